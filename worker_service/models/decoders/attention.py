"""The first half of a decoder layer: attention with keys and values of its own, or multi-head latent attention."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.inputs import AttentionMetadata
from kernels.ops import Ops
from worker_service.models.decoders.decoder_config import DecoderConfig, LayerConfig
from worker_service.models.decoders.mlp import Projection
from worker_service.models.decoders.shard import Shard
from worker_service.models.layers.latent_up import LatentUp
from worker_service.models.layers.linear import Linear
from worker_service.parallel.ranks import Ranks

_LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, in DeepSeek's and in transformers' code, whatever rms_norm_eps is."""


class ByPosition(NamedTuple):
    """Values that follow from the positions of a step's tokens, for one layer."""

    rotation: tuple[Tensor, Tensor] | None
    """Cosines and sines from `rotary_tables`; None without rotary embeddings."""
    factors: Tensor | None
    """Factors on queries, [num_tokens, 1] float32, or None. See `Temperature`."""


class AttentionHalf(Protocol):
    @property
    def projections(self) -> list[Projection]:
        """All linear layers."""

    @property
    def adapted(self) -> list[Projection]:
        """The linear layers that can have adapters."""

    @property
    def vectors(self) -> Mapping[str, Tensor]:
        """Tensors besides those of linear layers, by their names in a checkpoint."""

    def __call__(
        self,
        x: Tensor,
        by_position: ByPosition,
        layer_cache: Any,
        slots: Tensor,
        attention: AttentionMetadata,
        adapter_slots: Tensor | None,
    ) -> Tensor:
        """x: [num_tokens, hidden_size]; layer_cache, slots: see `store_kv`, or the layer's states, a tuple;
        adapter_slots: see `Linear`. Returns [num_tokens, hidden_size], which the caller sums over all ranks."""


class QkvAttention:
    """Query, key and value are one product."""

    def __init__(
        self, config: DecoderConfig, layer: LayerConfig, dtype: torch.dtype, device: torch.device, ranks: Ranks,
        shard: Shard, ops: Ops, *, deferred: bool,
    ) -> None:  # fmt: skip
        """Allocate this rank's weights unfilled. deferred: see `Linear.allocate`."""
        self._config, self._layer, self._ops = config, layer, ops
        self._heads = [len(heads) * config.head_dim for heads in (shard.heads, shard.kv_heads, shard.kv_heads)]
        vector = partial(torch.empty, dtype=dtype, device=device)
        self._norms: tuple[Tensor, Tensor] | None = None
        """Weights for each head, which the kernel applies."""
        self._norms_of_all: NormsOfAllHeads | None = None
        if config.qk_norm == "all":
            # A key-value head that several ranks have is counted by each of them.
            kv_heads = config.num_kv_heads * max(1, ranks.size // config.num_kv_heads)
            sizes = [count * config.head_dim for count in (config.num_heads, kv_heads)]
            norms = vector(self._heads[0]), vector(self._heads[1])
            self._norms_of_all = NormsOfAllHeads(norms, sizes, config.rms_norm_eps, ranks, ops)
        elif config.qk_norm == "head":
            query_norm, key_norm = vector(2, config.head_dim)
            self._norms = query_norm, key_norm
        elif config.qk_norm == "plain" and layer.rope is not None:
            ones = torch.ones(config.head_dim, dtype=dtype, device=device)
            self._norms = ones, ones
        # float32, because the kernels add sinks to scores in float32.
        self._sinks = torch.empty(len(shard.heads), device=device) if config.sinks else None
        allocate = partial(Linear.allocate, dtype=dtype, device=device, deferred=deferred, ops=ops)
        hidden = config.hidden_size
        parts = [self._heads[0] * (2 if config.gated_attention else 1), *self._heads[1:]]
        self._parts = parts[:1] if layer.reads is not None else parts[: 2 if layer.key_is_value else 3]
        """Outputs of the projections of query, key and value, as far as the layer has them."""
        self._ones = torch.ones(config.head_dim, dtype=dtype, device=device) if config.value_norm else None
        """The weights of the value's norm."""
        self._qkv = allocate(sum(self._parts), hidden, config.qkv_bias)
        wide, adds_bias = ops.WIDE_PRODUCTS, ranks.rank == 0
        self._out = allocate(hidden, self._heads[0], config.out_bias, wide=wide, adds_bias=adds_bias)

    @property
    def projections(self) -> list[Projection]:
        names = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
        if self._config.fused_checkpoint:
            qkv = {"self_attn.qkv_proj": sum(self._parts)}
        else:
            qkv = dict(zip(names, self._parts, strict=False))
        return [(self._qkv, qkv), (self._out, {"self_attn.o_proj": self._config.hidden_size})]

    @property
    def adapted(self) -> list[Projection]:
        return self.projections

    @property
    def vectors(self) -> dict[str, Tensor]:
        sinks = {} if self._sinks is None else {"self_attn.sinks": self._sinks}
        norms = self._norms if self._norms_of_all is None else self._norms_of_all.weights
        if norms is None or self._config.qk_norm == "plain":
            return sinks
        names = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")[: len(self._parts)]
        return sinks | dict(zip(names, norms, strict=False))

    def __call__(
        self,
        x: Tensor,
        by_position: ByPosition,
        layer_cache: Tensor,
        slots: Tensor,
        attention: AttentionMetadata,
        adapter_slots: Tensor | None,
    ) -> Tensor:
        config, gate, qkv = self._config, None, self._qkv(x, adapter_slots)
        if self._layer.reads is not None:
            return self._out(self._of_earlier_keys(qkv, by_position, layer_cache, attention), adapter_slots)
        if config.gated_attention:
            queries, others = torch.split(qkv, [self._parts[0], sum(self._parts[1:])], dim=1)
            queries, gate = queries.unflatten(1, (-1, 2, config.head_dim)).unbind(2)  # type: ignore[no-untyped-call]
            qkv = torch.cat((queries.flatten(1), others), dim=1)
        attended = self._ops.qkv_attention(
            self._prepared(qkv, by_position),
            self._norms,
            config.rms_norm_eps,
            config.norm_offset,
            by_position.rotation,
            layer_cache,
            slots,
            attention,
            config.attention_scale,
            self._layer.window,
            config.attention_soft_cap,
            self._sinks,
            self._layer.chunked,
        )
        if gate is not None:
            attended = self._ops.gated_activation(torch.cat((gate.flatten(1), attended), dim=1), "sigmoid")
        return self._out(attended, adapter_slots)

    def _of_earlier_keys(
        self, queries: Tensor, by_position: ByPosition, layer_cache: Tensor, attention: AttentionMetadata
    ) -> Tensor:
        """Attention to the keys and values that an earlier layer has stored. queries: [num_tokens, query elements]."""
        config, layer, ops = self._config, self._layer, self._ops
        heads = queries.view(-1, config.head_dim)
        if self._norms is not None:
            heads = ops.rms_norm(heads, self._norms[0], config.rms_norm_eps, config.norm_offset)
        heads = heads.view(len(queries), -1, config.head_dim)
        if by_position.rotation is not None:
            ops.rotary_embedding(heads, *by_position.rotation)
        attended = ops.paged_attention(
            heads, layer_cache, attention, config.attention_scale, layer.window, config.attention_soft_cap,
            sinks=self._sinks, chunked=layer.chunked,
        )  # fmt: skip
        return attended.flatten(1)

    def _prepared(self, qkv: Tensor, by_position: ByPosition) -> Tensor:
        """The input of the kernel, which does not compute these operations. Interleaved pairs are moved to the two
        halves of a head, in queries and keys alike, so that products stay the same."""
        swaps = self._config.interleaved and by_position.rotation is not None
        if self._layer.key_is_value:
            qkv = torch.cat((qkv, qkv[:, self._parts[0] :]), dim=1)
        if self._ones is not None:
            value = qkv[:, -self._heads[2] :]
            normed = self._ops.rms_norm(value.reshape(-1, self._config.head_dim), self._ones, self._config.rms_norm_eps)
            value.copy_(normed.view_as(value))
        if self._norms_of_all is None and by_position.factors is None and not swaps:
            return qkv
        query, key, value = torch.split(qkv, self._heads, dim=1)
        if self._norms_of_all is not None:
            query, key = self._norms_of_all(query, key)
        if by_position.factors is not None:
            query = (query * by_position.factors).to(qkv.dtype)
        if swaps:
            pairs = (-1, self._config.head_dim // 2, 2)
            query, key = (part.unflatten(1, pairs).transpose(2, 3).flatten(1) for part in (query, key))  # type: ignore[no-untyped-call]
        return torch.cat((query, key, value), dim=1)


class NormsOfAllHeads:
    """Norms of a token's query and key over all heads. Ranks add up the squares of their heads."""

    def __init__(
        self, weights: tuple[Tensor, Tensor], sizes: Sequence[int], eps: float, ranks: Ranks, ops: Ops
    ) -> None:
        """weights: of this rank's heads, for query and key. sizes: elements of query and key on all ranks together."""
        self.weights = weights
        self._eps, self._ranks, self._ops = eps, ranks, ops
        self._sizes = torch.tensor(sizes, device=weights[0].device, dtype=torch.float32)

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Both [num_tokens, elements of this rank's heads]."""
        parts = (query, key)
        if self._ranks.size == 1:
            one, other = (self._ops.rms_norm(*pair, self._eps) for pair in zip(parts, self.weights, strict=True))
            return one, other
        squares = torch.stack([part.float().square().sum(1) for part in parts], dim=1)
        scales = (self._ranks.all_reduce(squares) / self._sizes + self._eps).rsqrt()
        one, other = (
            (part * scale[:, None] * weight).to(part.dtype)
            for part, scale, weight in zip(parts, scales.unbind(1), self.weights, strict=True)
        )
        return one, other


class LatentAttention:
    """The KV cache stores a token's normalised latent and rotated key elements, which are one key for all heads. Its
    first elements, the latent, are also the value. The up-projections are absorbed, for prompts as for decodes: keys
    and values of single heads would be other sums, and a token's bits would depend on the chunk that computes it."""

    def __init__(
        self, config: DecoderConfig, layer: LayerConfig, dtype: torch.dtype, device: torch.device,  # noqa: ARG002
        ranks: Ranks, shard: Shard, ops: Ops, *, deferred: bool,
    ) -> None:  # fmt: skip
        """Allocate this rank's weights unfilled. deferred: see `Linear.allocate`."""
        assert config.latent is not None
        self._config, self._latent, self._ops = config, config.latent, ops
        latent, num_heads, hidden = config.latent, len(shard.heads), config.hidden_size
        allocate = partial(Linear.allocate, dtype=dtype, device=device, deferred=deferred, ops=ops)
        inputs = hidden
        self._query_down: Linear | None = None
        if (query_rank := latent.query_rank) is not None:
            self._query_down, inputs = allocate(query_rank, hidden, config.qkv_bias), query_rank
            self._query_norm = torch.empty(query_rank, dtype=dtype, device=device)
        self._query = allocate(num_heads * latent.query_dim, inputs, False)
        self._down = allocate(latent.key_dim, hidden, config.qkv_bias)
        self._norm = torch.empty(latent.rank, dtype=dtype, device=device)
        sizes = latent.plain_dim, latent.value_dim
        self._up = LatentUp(num_heads, sizes, latent.rank, dtype, device, ops, deferred=deferred)
        wide, adds_bias = ops.WIDE_PRODUCTS, ranks.rank == 0
        self._out = allocate(hidden, num_heads * latent.value_dim, config.out_bias, wide=wide, adds_bias=adds_bias)
        self._num_heads = num_heads

    @property
    def projections(self) -> list[Projection]:
        latent = self._latent
        up = {"self_attn.kv_b_proj": self._num_heads * (latent.plain_dim + latent.value_dim)}
        return [*self.adapted, (self._up, up)]

    @property
    def adapted(self) -> list[Projection]:
        """All but `kv_b_proj`, which is absorbed."""
        latent = self._latent
        query: list[Projection] = [(self._query, {"self_attn.q_proj": self._num_heads * latent.query_dim})]
        if self._query_down is not None and latent.query_rank is not None:
            query = [
                (self._query_down, {"self_attn.q_a_proj": latent.query_rank}),
                (self._query, {"self_attn.q_b_proj": self._num_heads * latent.query_dim}),
            ]
        return [
            *query,
            (self._down, {"self_attn.kv_a_proj_with_mqa": latent.key_dim}),
            (self._out, {"self_attn.o_proj": self._config.hidden_size}),
        ]

    @property
    def vectors(self) -> dict[str, Tensor]:
        vectors = {"self_attn.kv_a_layernorm.weight": self._norm}
        return vectors if self._query_down is None else vectors | {"self_attn.q_a_layernorm.weight": self._query_norm}

    def __call__(
        self,
        x: Tensor,
        by_position: ByPosition,
        layer_cache: Tensor,
        slots: Tensor,
        attention: AttentionMetadata,
        adapter_slots: Tensor | None,
    ) -> Tensor:
        rotation = by_position.rotation
        assert rotation is not None
        latent, ops = self._latent, self._ops
        inputs = x
        if self._query_down is not None:
            inputs = ops.rms_norm(self._query_down(x, adapter_slots), self._query_norm, _LATENT_EPS)
        queries = self._query(inputs, adapter_slots)
        if by_position.factors is not None:
            queries = (queries * by_position.factors).to(x.dtype)
        queries = queries.view(len(x), -1, latent.query_dim)
        plain, turned = torch.split(queries, [latent.plain_dim, latent.rotary_dim], dim=2)
        down = self._down(x, adapter_slots)
        normed = ops.rms_norm(down[:, : latent.rank], self._norm, _LATENT_EPS)
        keys = torch.cat((normed[:, None], self._rotated(down[:, None, latent.rank :], rotation)), dim=2)
        ops.store_kv(keys, keys, layer_cache, slots)
        queries = torch.cat((self._up.queries(plain), self._rotated(turned, rotation)), dim=2)
        attended = ops.paged_attention(queries, layer_cache, attention, self._config.attention_scale)
        values = self._up.values(attended[:, :, : latent.rank])
        return self._out(values.flatten(1), adapter_slots)

    def _rotated(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """A rotated copy of x, [num_tokens, heads, rotary_dim]. Interleaved pairs are moved to the two halves, in
        queries and keys alike, so that products stay the same."""
        if self._latent.interleaved:
            x = x.reshape(*x.shape[:2], -1, 2).transpose(2, 3).flatten(2)
        x = x.contiguous()
        self._ops.rotary_embedding(x, *rotation)
        return x
