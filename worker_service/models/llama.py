"""The Llama family, with the query, key and value projections fused into one product and gate and up into another.

Mistral without a sliding window is the same network. Weights are allocated once, in their final places;
`checkpoint_tensors` says which part of them each tensor of a checkpoint fills. (Touvron et al., 2023.)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention import AttentionMetadata, paged_attention
from kernels.reference import rms_norm, rotary_embedding, rotary_tables, silu_and_mul, store_kv
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
        self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, slots: Tensor, attention: AttentionMetadata
    ) -> Tensor:
        """x: [num_tokens, hidden_size]; cos, sin: from `rotary_tables`; layer_cache, slots: as `store_kv` has them."""
        config = self._config
        qkv = self._qkv(rms_norm(x, self._attention_norm, config.rms_norm_eps))
        query, key, value = (part.view(len(x), -1, config.head_dim) for part in torch.split(qkv, self._heads, dim=-1))
        store_kv(rotary_embedding(key, cos, sin), value, layer_cache, slots)
        query = rotary_embedding(query, cos, sin)
        x = x + self._out(paged_attention(query, layer_cache, attention, config.head_dim**-0.5).flatten(1))
        return x + self._down(silu_and_mul(self._gate_up(rms_norm(x, self._mlp_norm, config.rms_norm_eps))))


class LlamaForCausalLM:
    """The network from token ids to logits."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the weights, without values yet."""
        self.config = config
        self._embedding = torch.empty(config.vocabulary_size, config.hidden_size, dtype=dtype, device=device)
        self._layers = [DecoderLayer(config, dtype, device) for _ in range(config.num_layers)]
        self._norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
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
        x = functional.embedding(token_ids, self._embedding)
        for number, layer in enumerate(self._layers):
            x = layer.forward(x, cos, sin, cache[:, number], slots, attention)
        return rms_norm(x, self._norm, self.config.rms_norm_eps)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden_size]; returns [rows, vocabulary_size]."""
        return self._lm_head(hidden)
