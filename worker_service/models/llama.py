"""The Llama family, with the query, key and value projections fused into one product and gate and up into another.

Mistral without a sliding window is the same network. Weights are allocated once, in their final places;
`checkpoint_tensors` says which part of them each tensor of a checkpoint fills. (Touvron et al., 2023.)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.metadata import AttentionMetadata
from kernels.ops import Ops, ops_for
from kernels.reference import rotary_tables
from worker_service.models.linear import Linear
from worker_service.models.rope import inverse_frequencies


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes and switches of a network."""

    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    inverse_frequencies: Tensor
    rope_scale: float

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "LlamaConfig":
        """Read a config.json. Raises ValueError, KeyError or TypeError where it describes no such network."""
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"the activation '{config['hidden_act']}' is not supported; supported is silu")
        if config.get("sliding_window") is not None:
            raise ValueError("a sliding window is not supported")
        hidden_size, num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        head_dim = int(config.get("head_dim") or hidden_size // num_heads)
        frequencies, rope_scale = inverse_frequencies(config, head_dim)
        sizes = {
            "vocabulary_size": int(config["vocab_size"]),
            "hidden_size": hidden_size,
            "intermediate_size": int(config["intermediate_size"]),
            "num_layers": int(config["num_hidden_layers"]),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_model_len": int(config["max_position_embeddings"]),
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}")
        if num_heads % num_kv_heads or head_dim % 2:
            raise ValueError(f"{num_heads} heads of size {head_dim} cannot share {num_kv_heads} key-value heads")
        return cls(
            **sizes,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            inverse_frequencies=frequencies,
            rope_scale=rope_scale,
        )


class DecoderLayer:
    """Attention, then a gated feed-forward network, each on the normalised and added to the plain."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._ops: Ops = ops_for(device)
        self._heads = [
            heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        ]
        hidden, inner = config.hidden_size, config.intermediate_size
        self._attention_norm = torch.empty(hidden, dtype=dtype, device=device)
        self._mlp_norm = torch.empty(hidden, dtype=dtype, device=device)
        self._qkv = Linear.allocate(sum(self._heads), hidden, config.attention_bias, dtype, device)
        self._out = Linear.allocate(hidden, self._heads[0], config.attention_bias, dtype, device)
        self._gate_up = Linear.allocate(2 * inner, hidden, config.mlp_bias, dtype, device)
        self._down = Linear.allocate(hidden, inner, config.mlp_bias, dtype, device)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self._qkv, self._out, self._gate_up, self._down

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """What each tensor of this layer in a checkpoint fills."""
        config = self._config
        query, key, value = self._heads
        return {
            "input_layernorm.weight": self._attention_norm,
            "post_attention_layernorm.weight": self._mlp_norm,
            **self._qkv.parts({"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": value}),
            **self._out.parts({"self_attn.o_proj": config.hidden_size}),
            **self._gate_up.parts({"mlp.gate_proj": config.intermediate_size, "mlp.up_proj": config.intermediate_size}),
            **self._down.parts({"mlp.down_proj": config.hidden_size}),
        }

    def forward(
        self,
        delta: Tensor | None,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer_cache: Tensor,
        slots: Tensor,
        attention: AttentionMetadata,
    ) -> Tensor:
        """Bring `residual` up to this layer's attention in place, and return what its second half adds to it.

        delta, residual: [num_tokens, hidden_size], where delta is what the layer before adds, None at the first; cos,
        sin: from `rotary_tables`; layer_cache, slots: as `store_kv` has them.
        """
        config, ops = self._config, self._ops
        eps = config.rms_norm_eps
        if delta is None:
            x = ops.rms_norm(residual, self._attention_norm, eps)
        else:
            x = ops.add_rms_norm(delta, residual, self._attention_norm, eps)
        query, key, value = (
            part.view(len(part), -1, config.head_dim) for part in torch.split(self._qkv(x), self._heads, dim=1)
        )
        ops.rotary_embedding(query, cos, sin)
        ops.rotary_embedding(key, cos, sin)
        ops.store_kv(key, value, layer_cache, slots)
        attended = ops.paged_attention(query, layer_cache, attention, config.head_dim**-0.5)
        x = ops.add_rms_norm(self._out(attended.flatten(1)), residual, self._mlp_norm, eps)
        return self._down(ops.gated_activation(self._gate_up(x), "silu"))


class LlamaForCausalLM:
    """The network from token ids to logits."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the weights, without values yet."""
        self.config = config
        self._embedding = torch.empty(config.vocabulary_size, config.hidden_size, dtype=dtype, device=device)
        self._layers = [DecoderLayer(config, dtype, device) for _ in range(config.num_layers)]
        self._norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self._ops = ops_for(device)
        self._lm_head = Linear(self._embedding if config.tied_embeddings else torch.empty_like(self._embedding))
        self._inverse_frequencies = config.inverse_frequencies.to(device)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint must hold, by their names in it, and the places that they fill."""
        tensors = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        if not self.config.tied_embeddings:
            tensors["lm_head.weight"] = self._lm_head.weight
        for number, layer in enumerate(self._layers):
            tensors |= {f"model.layers.{number}.{name}": part for name, part in layer.checkpoint_tensors().items()}
        return tensors

    def pack(self) -> None:
        """Pack the weights for fast products. Call it once, when `checkpoint_tensors` have been filled."""
        for linear in (self._lm_head, *(linear for layer in self._layers for linear in layer.linears)):
            linear.pack()

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, attention: AttentionMetadata, cache: Tensor
    ) -> Tensor:
        """Compute tokens and store their keys and values.

        token_ids, positions, slots: [num_tokens] int64; cache: [num_blocks, num_layers, 2, block_size, num_kv_heads,
        head_dim]. Returns the normalised hidden states, [num_tokens, hidden_size].
        """
        cos, sin = rotary_tables(positions, self._inverse_frequencies, self.config.rope_scale)
        residual, delta = functional.embedding(token_ids, self._embedding), None
        for number, layer in enumerate(self._layers):
            delta = layer.forward(delta, residual, cos, sin, cache[:, number], slots, attention)
        assert delta is not None  # a network has a layer
        return self._ops.add_rms_norm(delta, residual, self._norm, self.config.rms_norm_eps)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden_size]; returns [rows, vocabulary_size]."""
        return self._lm_head(hidden)
