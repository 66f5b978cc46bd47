"""The decoder layer of a drafting head, and the hidden states beside its keys and values. A token is drafted from the
previous token's state, computed by the head for a draft and otherwise by the target. The states are stored like
additional layers of the cache, so that they move and are shared with their blocks."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backends import ops_for
from kernels.inputs import AttentionMetadata, rotary_tables
from kernels.ops import Ops
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.layers.linear import Linear


def num_state_layers(config: DecoderConfig) -> int:
    """Cache layers, with keys and values, that a token's hidden state occupies."""
    return -(-config.hidden_size // (2 * config.num_kv_heads * config.head_dim))


class Head(Protocol):
    """A network that drafts tokens from a target's hidden states. cache: [num_blocks, 1 + num_state_layers, 2,
    block_size, num_kv_heads, head_dim]. slots: [num_tokens] int64, the same as in the target's cache."""

    @property
    def states_before(self) -> Sequence[int]:
        """Argument `before` of `Decoder.show_states`."""

    def read(self, states: Sequence[Tensor], slots: Tensor, cache: Tensor) -> None:
        """Compute and store input states. states: [num_tokens, target's hidden_size] for each of `states_before`."""

    def keep(self, states: Tensor, slots: Tensor, cache: Tensor) -> None:
        """Store hidden states of `forward`, [num_tokens, hidden_size]."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, attention: AttentionMetadata, cache: Tensor
    ) -> Tensor:
        """Run the head over tokens, each with the stored state of the token before. Returns [num_tokens, hidden_size].
        token_ids: [num_tokens] int64. positions, slots: [num_tokens] int64, of the token before each token."""

    def compute_logits(self, states: Tensor) -> Tensor:
        """states: [rows, hidden_size] from `forward`. Returns [rows, vocabulary_size] float32, -inf for tokens without
        a logit."""


class HeadLayer:
    """Both halves of the layer. The caller normalises the input of attention."""

    def __init__(self, config: DecoderConfig, num_inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate weights unfilled. num_inputs: elements of a token's input to attention."""
        self._config = config
        self._dtype = dtype
        self._ops: Ops = ops_for(device)
        hidden, inner = config.hidden_size, config.intermediate_size
        kv_size = config.num_kv_heads * config.head_dim
        self._qkv_sizes = [config.num_heads * config.head_dim, kv_size, kv_size]
        vector = partial(torch.empty, dtype=dtype, device=device)
        self._mlp_norm = vector(hidden)
        self._qk_norms = (vector(config.head_dim), vector(config.head_dim)) if config.qk_norm else None
        allocate = partial(Linear.allocate, dtype=dtype, device=device)
        adds = partial(allocate, hidden, wide=self._ops.WIDE_PRODUCTS)
        self._qkv = allocate(sum(self._qkv_sizes), num_inputs, config.qkv_bias)
        self._out = adds(self._qkv_sizes[0], config.out_bias)
        self._gate_up = allocate(2 * inner, hidden, config.mlp_bias)
        self._down = adds(inner, config.mlp_bias)
        rope = config.layers[0].rope
        assert rope is not None
        self._frequencies, self._rope_scale = rope.inverse_frequencies.to(device), rope.scale

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Names are without the layer's prefix."""
        query, key, value = self._qkv_sizes
        hidden, inner = self._config.hidden_size, self._config.intermediate_size
        tensors = {
            "post_attention_layernorm.weight": self._mlp_norm,
            **self._qkv.parts({"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": value}),
            **self._out.parts({"self_attn.o_proj": hidden}),
            **self._gate_up.parts({"mlp.gate_proj": inner, "mlp.up_proj": inner}),
            **self._down.parts({"mlp.down_proj": hidden}),
        }
        if self._qk_norms is not None:
            tensors |= dict(zip(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), self._qk_norms, strict=True))
        return tensors

    def pack(self) -> None:
        for linear in (self._qkv, self._out, self._gate_up, self._down):
            linear.pack()

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: AttentionMetadata,
        cache: Tensor,
    ) -> None:
        """Add the outputs of both halves to `residual` in place. x: [num_tokens, num_inputs]; residual: [num_tokens,
        hidden_size] float32."""
        config, ops = self._config, self._ops
        rotation = rotary_tables(positions, self._frequencies, self._rope_scale)
        attended = ops.qkv_attention(
            self._qkv(x),
            self._qk_norms,
            config.rms_norm_eps,
            0.0,
            rotation,
            cache[:, 0],
            slots,
            attention,
            config.attention_scale,
        )
        x = ops.add_rms_norm(self._out(attended), residual, self._mlp_norm, config.rms_norm_eps)
        residual += self._down(ops.gated_activation(self._gate_up(x), config.activation))

    def keep(self, states: Tensor, slots: Tensor, cache: Tensor) -> None:
        num_layers, (num_heads, head_dim) = cache.shape[1] - 1, cache.shape[4:]
        room = num_layers * 2 * num_heads * head_dim
        padded = functional.pad(states.to(self._dtype), (0, room - states.shape[1]))
        parts = padded.view(-1, num_layers, 2, num_heads, head_dim)
        for number in range(num_layers):
            self._ops.store_kv(parts[:, number, 0], parts[:, number, 1], cache[:, 1 + number], slots)

    def kept(self, slots: Tensor, cache: Tensor) -> Tensor:
        """The states stored by `keep`, [num_tokens, hidden_size] float32."""
        block_size = cache.shape[3]
        blocks = torch.div(slots, block_size, rounding_mode="floor")
        found = cache[blocks, 1:, :, slots - blocks * block_size]
        return found.flatten(1)[:, : self._config.hidden_size].float().contiguous()
