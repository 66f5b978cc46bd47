"""EAGLE-3's head: one layer that guesses the next token from the target's own states. (Li et al., 2025.)

For a token it takes the token's embedding and, of the token before it, the target's states at three depths, of which a
product makes one state. Where the target has not computed that token, because it is a guess itself, the head's own
state of it stands in. These states are kept in the head's cache, where keys and values of further layers would lie, so
that whatever moves, copies or shares a block does so with them.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backends import ops_for
from kernels.metadata import AttentionMetadata
from kernels.ops import Ops
from kernels.reference import rotary_tables
from worker_service.models.eagle_config import EagleConfig
from worker_service.models.linear import Linear


def num_state_layers(config: EagleConfig) -> int:
    """Layers of keys and values that have room for a state."""
    layer = config.layer
    return -(-layer.hidden_size // (2 * layer.num_kv_heads * layer.head_dim))


class EagleHead:
    """The network. Its cache: [num_blocks, 1 + num_state_layers, 2, block_size, num_kv_heads, head_dim]."""

    def __init__(self, config: EagleConfig, dtype: torch.dtype, device: torch.device, *, has_embedding: bool) -> None:
        """Allocate the weights, without values yet; has_embedding: of its own, rather than the target's."""
        self.config = config
        self._ops: Ops = ops_for(device)
        self._dtype = dtype
        layer = config.layer
        hidden, inner = layer.hidden_size, layer.intermediate_size
        kv_size = layer.num_kv_heads * layer.head_dim
        self._qkv_sizes = [layer.num_heads * layer.head_dim, kv_size, kv_size]
        vector = partial(torch.empty, dtype=dtype, device=device)
        self._embedding_norm, self._state_norm, self._mlp_norm, self._norm = (vector(hidden) for _ in range(4))
        self._qk_norms = (vector(layer.head_dim), vector(layer.head_dim)) if layer.qk_norm else None
        allocate = partial(Linear.allocate, dtype=dtype, device=device)
        adds = partial(allocate, hidden, wide=self._ops.WIDE_PRODUCTS)
        self._fc = allocate(hidden, 3 * config.target_hidden_size, False)
        self._qkv = allocate(sum(self._qkv_sizes), 2 * hidden, layer.qkv_bias)
        self._out = adds(self._qkv_sizes[0], layer.out_bias)
        self._gate_up = allocate(2 * inner, hidden, layer.mlp_bias)
        self._down = adds(inner, layer.mlp_bias)
        self._lm_head = allocate(config.num_guessable, hidden, False, wide=True)
        self._table = vector(layer.vocabulary_size, hidden) if has_embedding else None
        self._embedding: Callable[[Tensor], Tensor] = self._look_up
        rope = layer.layers[0].rope
        assert rope is not None
        self._frequencies, self._rope_scale = rope.inverse_frequencies.to(device), rope.scale
        self._token_ids: Tensor | None = None

    def checkpoint_tensors(self, layer: str) -> dict[str, Tensor]:
        """As `Loadable` has it; layer: the name of the layer in the checkpoint."""
        query, key, value = self._qkv_sizes
        inner = self.config.layer.intermediate_size
        tensors = {
            "hidden_norm.weight": self._state_norm,
            "input_layernorm.weight": self._embedding_norm,
            "post_attention_layernorm.weight": self._mlp_norm,
            **self._qkv.parts({"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": value}),
            **self._out.parts({"self_attn.o_proj": self.config.layer.hidden_size}),
            **self._gate_up.parts({"mlp.gate_proj": inner, "mlp.up_proj": inner}),
            **self._down.parts({"mlp.down_proj": self.config.layer.hidden_size}),
        }
        if self._qk_norms is not None:
            tensors |= dict(zip(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), self._qk_norms, strict=True))
        whole = {f"{layer}.{name}": tensor for name, tensor in tensors.items()}
        whole |= {"norm.weight": self._norm, "fc.weight": self._fc.weight, "lm_head.weight": self._lm_head.weight}
        if self._table is not None:
            whole["embed_tokens.weight"] = self._table
        return whole

    def pack(self, token_ids: Tensor | None, embedding: Callable[[Tensor], Tensor]) -> None:
        """Prepare the weights for use. Called once, when `checkpoint_tensors` have been filled.

        token_ids: [num_guessable] int64, the token of each logit; None where there is one for every token, in order;
        embedding: the target's, from [num_tokens] int64 to [num_tokens, hidden_size] float32.
        """
        if self._table is None:
            self._embedding = embedding
        for linear in (self._fc, self._qkv, self._out, self._gate_up, self._down, self._lm_head):
            linear.pack()
        self._token_ids = token_ids

    def _look_up(self, token_ids: Tensor) -> Tensor:
        assert self._table is not None
        return functional.embedding(token_ids, self._table).float()

    def read(self, states: Sequence[Tensor], slots: Tensor, cache: Tensor) -> None:
        """Keep what the target's states make.

        states: three of [num_tokens, target_hidden_size]; slots: as the target stores keys and values.
        """
        self.keep(self._fc(torch.cat(list(states), dim=1)), slots, cache)

    def keep(self, states: Tensor, slots: Tensor, cache: Tensor) -> None:
        """Keep states, [num_tokens, hidden_size], of the tokens in these slots."""
        num_layers, (num_heads, head_dim) = cache.shape[1] - 1, cache.shape[4:]
        room = num_layers * 2 * num_heads * head_dim
        padded = functional.pad(states.to(self._dtype), (0, room - states.shape[1]))
        parts = padded.view(-1, num_layers, 2, num_heads, head_dim)
        for number in range(num_layers):
            self._ops.store_kv(parts[:, number, 0], parts[:, number, 1], cache[:, 1 + number], slots)

    def _kept(self, slots: Tensor, cache: Tensor) -> Tensor:
        """The states of the tokens in these slots, [num_tokens, hidden_size]."""
        block_size = cache.shape[3]
        blocks = torch.div(slots, block_size, rounding_mode="floor")
        found = cache[blocks, 1:, :, slots - blocks * block_size]
        return found.flatten(1)[:, : self.config.layer.hidden_size]

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, attention: AttentionMetadata, cache: Tensor
    ) -> Tensor:
        """Compute tokens from the states of those before them, which lie in these slots at these positions.

        token_ids, positions, slots: [num_tokens] int64. Returns the head's own states, [num_tokens, hidden_size]
        float32, before their last norm.
        """
        ops, layer = self._ops, self.config.layer
        eps = layer.rms_norm_eps
        residual = self._kept(slots, cache).float().contiguous()
        normed = ops.rms_norm(residual, self._state_norm, eps)
        if self.config.norm_before_residual:
            residual = normed.float()
        x = torch.cat([ops.rms_norm(self._embedding(token_ids), self._embedding_norm, eps), normed], dim=1)
        rotation = rotary_tables(positions, self._frequencies, self._rope_scale)
        attended = ops.qkv_attention(
            self._qkv(x), self._qk_norms, eps, 0.0, rotation, cache[:, 0], slots, attention, layer.attention_scale
        )
        x = ops.add_rms_norm(self._out(attended), residual, self._mlp_norm, eps)
        residual += self._down(ops.gated_activation(self._gate_up(x), layer.activation))
        return residual

    def compute_logits(self, states: Tensor) -> Tensor:
        """states: [rows, hidden_size] of `forward`; returns [rows, vocabulary_size] float32, -inf for tokens that have
        none."""
        layer = self.config.layer
        logits = self._lm_head(self._ops.rms_norm(states, self._norm, layer.rms_norm_eps))
        if self._token_ids is None:
            return logits
        whole = logits.new_full((len(logits), layer.vocabulary_size), -torch.inf)
        return whole.index_copy_(1, self._token_ids, logits)
