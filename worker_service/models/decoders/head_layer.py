"""The layer of a head that drafts, and the states that a head keeps beside its keys and values.

A head computes a token from what was computed of the token before it: the target's states, or, where the target has not
computed that token because it is a draft itself, the head's own. They are kept in the head's cache, where keys and
values of further layers would lie, so that whatever moves, copies or shares a block does so with them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention.metadata import AttentionMetadata
from kernels.backends import ops_for
from kernels.ops import Ops
from kernels.reference import rotary_tables
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.layers.linear import Linear


def num_state_layers(config: DecoderConfig) -> int:
    """Layers of keys and values that have room for a state."""
    return -(-config.hidden_size // (2 * config.num_kv_heads * config.head_dim))


class Head(Protocol):
    """A network that drafts from a target's states.

    cache: [num_blocks, 1 + num_state_layers, 2, block_size, num_kv_heads, head_dim]; slots: [num_tokens] int64, as the
    target stores keys and values of these tokens.
    """

    @property
    def states_before(self) -> Sequence[int]:
        """The states that it reads, as `Decoder.show_states` has them."""

    def read(self, states: Sequence[Tensor], slots: Tensor, cache: Tensor) -> None:
        """Keep what the target's states make, which are [num_tokens, target's hidden_size] each."""

    def keep(self, states: Tensor, slots: Tensor, cache: Tensor) -> None:
        """Keep states of its own, [num_tokens, hidden_size]."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, attention: AttentionMetadata, cache: Tensor
    ) -> Tensor:
        """Compute tokens from the states of those before them, which lie in these slots at these positions.

        token_ids, positions, slots: [num_tokens] int64. Returns states of its own, [num_tokens, hidden_size].
        """

    def compute_logits(self, states: Tensor) -> Tensor:
        """states: [rows, hidden_size] of `forward`; returns [rows, vocabulary_size] float32, -inf for tokens that have
        none."""


class HeadLayer:
    """One layer over its cache, behind the norm of its inputs."""

    def __init__(self, config: DecoderConfig, num_inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the weights, without values yet. num_inputs: of its attention."""
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
        """As `Loadable` has it; names within the layer."""
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
        """As `Loadable` has it."""
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
        """Add what the layer makes of x, [num_tokens, num_inputs], to residual, [num_tokens, hidden_size] float32."""
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
        """As `Head` has it."""
        num_layers, (num_heads, head_dim) = cache.shape[1] - 1, cache.shape[4:]
        room = num_layers * 2 * num_heads * head_dim
        padded = functional.pad(states.to(self._dtype), (0, room - states.shape[1]))
        parts = padded.view(-1, num_layers, 2, num_heads, head_dim)
        for number in range(num_layers):
            self._ops.store_kv(parts[:, number, 0], parts[:, number, 1], cache[:, 1 + number], slots)

    def kept(self, slots: Tensor, cache: Tensor) -> Tensor:
        """The states of the tokens in these slots, [num_tokens, hidden_size] float32."""
        block_size = cache.shape[3]
        blocks = torch.div(slots, block_size, rounding_mode="floor")
        found = cache[blocks, 1:, :, slots - blocks * block_size]
        return found.flatten(1)[:, : self._config.hidden_size].float().contiguous()
