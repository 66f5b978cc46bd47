"""The native decoder: Llama's network, with the variants of `DecoderConfig`.

Each half of a layer (attention, then an MLP) reads the normalised residual stream and adds to it. A rank holds a
`Shard`; halves and embeddings are summed over the ranks, and each rank computes the logits of its own tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.backends import ops_for
from kernels.float8 import Float8Weight
from kernels.inputs import AttentionMetadata, rotary_tables
from kernels.ops import Ops
from worker_service.models.causal_model import (
    AdapterPlace,
    Attention,
    Cache,
    Fill,
    GivenEmbeddings,
    Slots,
    by_layer,
)
from worker_service.models.config.rope import Rope
from worker_service.models.decoders.attention import AttentionHalf, LatentAttention, QkvAttention
from worker_service.models.decoders.decoder_config import DecoderConfig, LayerConfig
from worker_service.models.decoders.mlp import SHARED_EXPERTS, DenseMlp, MixtureMlp, Mlp, Projection
from worker_service.models.decoders.shard import Shard
from worker_service.models.decoders.states.halves import ConvolutionHalf, DeltaHalf, MambaHalf
from worker_service.models.layers.embedding import Embedding
from worker_service.models.layers.linear import NONE_QUANTIZED, Linear, Quantization, Quantized, head_quantization
from worker_service.models.layers.mixers import DeltaNet, Mamba2, ShortConvolution
from worker_service.parallel.ranks import ALONE, Ranks


class DecoderLayer:
    def __init__(
        self,
        config: DecoderConfig,
        layer: LayerConfig,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks,
        shard: Shard,
        ops: Ops,
        *,
        deferred: bool = False,
    ) -> None:
        self._config = config
        self._ops = ops
        self._ranks = ranks
        hidden = config.hidden_size
        self._attention_norm = torch.empty(hidden, dtype=dtype, device=device)
        self._mlp_norm = torch.empty(hidden, dtype=dtype, device=device)
        self._attention_post_norm, self._mlp_post_norm = (
            torch.empty(hidden, dtype=dtype, device=device) if config.post_norms else None for _ in range(2)
        )
        self._attention: AttentionHalf = _first_half(config, layer, dtype, device, ranks, shard, ops, deferred)
        dense = partial(
            DenseMlp, config, dtype=dtype, device=device, adds_bias=ranks.rank == 0, deferred=deferred, ops=ops
        )
        self._mlp: Mlp
        if (mixture := layer.mixture) is None:
            self._mlp = dense(len(shard.inner))
        else:
            inner = len(shard.expert_inner)
            shared = dense(len(shard.shared_inner), name=SHARED_EXPERTS) if mixture.shared_size else None
            self._mlp = MixtureMlp(
                config, mixture, inner, dtype, device, adds_bias=ranks.rank == 0, deferred=deferred, ops=ops,
                shared=shared,
            )  # fmt: skip

    @property
    def projections(self) -> list[Projection]:
        """All linear layers."""
        return self._named(self._attention.projections + self._mlp.projections)

    @property
    def adapted(self) -> list[Projection]:
        """The linear layers that can have adapters."""
        return self._named(self._attention.adapted + self._mlp.adapted)

    def _named(self, projections: list[Projection]) -> list[Projection]:
        name = self._config.name
        return [(linear, {name(part): size for part, size in parts.items()}) for linear, parts in projections]

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """See `Loadable.checkpoint_tensors`. Names are without the layer's prefix."""
        tensors = {"input_layernorm.weight": self._attention_norm, **self._attention.vectors, **self._mlp.vectors}
        if self._attention_post_norm is not None and self._mlp_post_norm is not None:
            tensors |= {
                "post_attention_layernorm.weight": self._attention_post_norm,
                "pre_feedforward_layernorm.weight": self._mlp_norm,
                "post_feedforward_layernorm.weight": self._mlp_post_norm,
            }
        else:
            tensors["post_attention_layernorm.weight"] = self._mlp_norm
        tensors = {self._config.name(name): tensor for name, tensor in tensors.items()}
        for linear, names in self.projections:
            tensors |= linear.parts(names)
        return tensors

    def forward(
        self,
        delta: Tensor | None,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        layer_cache: Any,
        slots: Tensor,
        attention: AttentionMetadata,
        adapter_slots: Tensor | None,
    ) -> Tensor:
        """Add `delta` and the attention's output to `residual` in place; return the second half's output. delta:
        [num_tokens, hidden_size], the previous layer's result, or None. residual: [num_tokens, hidden_size] float32.
        rotation: from `rotary_tables`, or None. layer_cache, slots: see `store_kv`; or the layer's
        states, a tuple."""
        config, ops = self._config, self._ops
        eps, offset = config.rms_norm_eps, config.norm_offset
        if delta is None:
            x = ops.rms_norm(residual, self._attention_norm, eps, offset)
        else:
            x = ops.add_rms_norm(delta, residual, self._attention_norm, eps, offset)
        delta = self._ranks.all_reduce(self._attention(x, rotation, layer_cache, slots, attention, adapter_slots))
        if self._attention_post_norm is not None:
            delta = ops.rms_norm(delta, self._attention_post_norm, eps, offset, torch.float32)
        if config.residual_scale != 1:
            delta = delta * config.residual_scale
        x = ops.add_rms_norm(delta, residual, self._mlp_norm, eps, offset)
        delta = self._ranks.all_reduce(self._mlp(x, adapter_slots))
        if self._mlp_post_norm is not None:
            delta = ops.rms_norm(delta, self._mlp_post_norm, eps, offset, torch.float32)
        return delta if config.residual_scale == 1 else delta * config.residual_scale


def _first_half(
    config: DecoderConfig,
    layer: LayerConfig,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
    shard: Shard,
    ops: Ops,
    deferred: bool,
) -> AttentionHalf:
    hidden, eps = config.hidden_size, config.rms_norm_eps
    match layer.mixer:
        case ShortConvolution():
            return ConvolutionHalf(layer.mixer, hidden, dtype, device, ops, deferred=deferred)
        case DeltaNet():
            return DeltaHalf(layer.mixer, hidden, eps, dtype, device, ops, deferred=deferred)
        case Mamba2():
            return MambaHalf(layer.mixer, hidden, eps, dtype, device, ops, deferred=deferred)
    attention = partial(QkvAttention, window=layer.window) if config.latent is None else LatentAttention
    return attention(config, dtype, device, ranks, shard, ops, deferred=deferred)


class Decoder:
    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
        *,
        batch_invariant: bool = False,
        fill: Fill | None = None,
    ) -> None:
        """Allocate this rank's weights unfilled. batch_invariant: see `ops_for`. fill: copies checkpoint tensors to
        their places. If given, `pack` allocates one layer at a time, and lets `fill` read the matrices needed in
        floating point; `pack` then raises the errors of `fill`."""
        self.config = config
        self._ranks = ranks
        self._ops: Ops = ops_for(device, batch_invariant)
        shard = Shard.of(config, ranks.rank, ranks.size)
        num_rows = -(-config.vocabulary_size // ranks.size)  # the last rank may have rows without a token
        table = partial(torch.empty, num_rows, config.hidden_size, dtype=dtype, device=device)
        self._embedding = Embedding(table(), shard.vocabulary, ranks)
        self._layers = [
            DecoderLayer(config, layer, dtype, device, ranks, shard, self._ops, deferred=fill is not None)
            for layer in config.layers
        ]
        self._fill = fill
        self._norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        # Rounded to the weights' dtype, as in training.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        # On the meta device, `empty_like` would import sympy: a fifth of a worker's start.
        head = self._embedding.weight if config.tied_embeddings else table()
        self._lm_head = Linear(head, wide=True, ops=self._ops)
        ropes = {layer.rope for layer in config.layers if layer.rope is not None}
        self._frequencies = {rope: rope.inverse_frequencies.to(device) for rope in ropes}
        self._axes = {rope: rope.axes.to(device) for rope in ropes if rope.axes is not None}
        self._shown: tuple[int, ...] = ()
        self._show: Callable[[Sequence[Tensor], Tensor], None] | None = None

    @property
    def embedding(self) -> Callable[[Tensor], Tensor]:
        """A function from token ids [num_tokens] int64 to [num_tokens, hidden_size] float32."""
        return self._embedding

    @property
    def prompt_embeds_size(self) -> int:
        return self.config.hidden_size

    def show_states(self, before: Sequence[int], show: Callable[[Sequence[Tensor], Tensor], None]) -> None:
        """In each forward pass, call `show` with the hidden states before the layers in `before`, and the slots. States
        are [num_tokens, hidden_size] in the weights' dtype. In `before`, num_layers means after the last layer, and
        num_layers + 1 after the last norm."""
        self._shown, self._show = tuple(before), show

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        embedding = self._embedding.own_rows(self._embedding.weight)
        tensors = {"model.embed_tokens.weight": embedding, self.config.name("model.norm.weight"): self._norm}
        if not self.config.tied_embeddings:
            tensors["lm_head.weight"] = self._embedding.own_rows(self._lm_head.weight)
        for number, layer in enumerate(self._layers):
            tensors |= {f"model.layers.{number}.{name}": part for name, part in layer.checkpoint_tensors().items()}
        return tensors

    def pack(self, quantization: Quantization = "none", quantized: Quantized = NONE_QUANTIZED) -> None:
        head = self._lm_head.weight
        name = "model.embed_tokens.weight" if self.config.tied_embeddings else "lm_head.weight"
        if isinstance(quantized.get("model.embed_tokens.weight"), Float8Weight):
            raise ValueError("model.embed_tokens.weight is stored in fp8; only weights of linear layers are read so")
        if (found := quantized.get(name)) is not None:
            self._lm_head.pack_parts([found], [len(head)])
        else:
            self._lm_head.pack(head_quantization(head.device, head.dtype, quantization))
        if self.config.tied_embeddings:
            self._embedding.take_rows_of(self._lm_head)
        elif (found := quantized.get("model.embed_tokens.weight")) is not None:
            rows = Linear(self._embedding.weight)
            rows.pack_parts([found], [len(head)])
            self._embedding.take_rows_of(rows)
        for number, layer in enumerate(self._layers):
            _pack_layer(layer, f"model.layers.{number}", quantization, quantized, self._fill)

    def allocate_adapters(self, num_slots: int, max_rank: int) -> dict[str, AdapterPlace]:
        places: dict[str, AdapterPlace] = {}
        for number, layer in enumerate(self._layers):
            for linear, names in layer.adapted:
                weights = linear.allocate_adapters(list(names.values()), num_slots, max_rank)
                for part, name in enumerate(names):
                    places[f"model.layers.{number}.{name}"] = AdapterPlace(weights, part)
        return places

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Slots,
        attention: Attention,
        cache: Cache,
        adapter_slots: Tensor | None = None,
        given: GivenEmbeddings | None = None,
    ) -> Tensor:
        """See `CausalModel.forward`. Hidden states are normalised by the last norm."""
        rotations = {
            rope: rotary_tables(self._turns(rope, positions), frequencies, rope.scale)
            for rope, frequencies in self._frequencies.items()
        }
        residual, delta = self._embedding(token_ids), None
        if given is not None and self.config.scales_given:
            residual[given.rows] = given.embeddings
        if self._embedding_scale != 1:
            residual *= self._embedding_scale
        if given is not None and not self.config.scales_given:
            residual[given.rows] = given.embeddings
        states: dict[int, Tensor] = {}
        places = by_layer(slots, attention, cache)
        for number, (layer, layer_config, place) in enumerate(
            zip(self._layers, self.config.layers, places, strict=True)
        ):
            if number in self._shown:
                states[number] = (residual.clone() if delta is None else residual + delta).to(self._norm.dtype)
            rotation = rotations[layer_config.rope] if layer_config.rope is not None else None
            delta = layer.forward(delta, residual, rotation, *place, adapter_slots)
            if given is not None and number < len(given.deep):
                residual[given.deep_rows] += given.deep[number]
        assert delta is not None  # every network has a layer
        normed = self._ops.add_rms_norm(delta, residual, self._norm, self.config.rms_norm_eps, self.config.norm_offset)
        if self._show is not None:
            behind = {len(self._layers): residual, len(self._layers) + 1: normed}
            shown = [(states | behind)[number].to(normed.dtype) for number in self._shown]
            assert isinstance(slots, Tensor)  # heads that draft share the cache's blocks
            self._show(shown, slots)
        return normed

    def _turns(self, rope: Rope, positions: Tensor) -> Tensor:
        """The position by which each pair turns, [num_tokens, pairs]; [num_tokens] if it is the same for all pairs."""
        return positions if positions.dim() == 1 else positions[self._axes[rope]].T.contiguous()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits, cap = self._lm_head(hidden), self.config.logit_soft_cap
        if self.config.logit_divisor != 1:
            logits = logits / self.config.logit_divisor
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        # All ranks get all logits, and so sample the same tokens without further communication.
        return self._ranks.all_gather(logits)[:, : self.config.vocabulary_size].contiguous()


def _pack_layer(
    layer: DecoderLayer, name: str, quantization: Quantization, quantized: Quantized, fill: Fill | None
) -> None:
    """Pack a layer. Floating-point values of weights on the meta device exist only during this call."""
    projections = [
        (linear, {f"{name}.{part}": size for part, size in parts.items()}) for linear, parts in layer.projections
    ]
    if fill is not None:
        fill(_materialised(projections, quantization, quantized))  # keeps no reference to the weights
    for linear, parts in projections:
        weights = [quantized.get(f"{part}.weight") for part in parts]
        if any(weight is not None for weight in weights):
            linear.pack_parts(weights, list(parts.values()))
        else:
            linear.pack(quantization)


def _materialised(
    projections: Sequence[Projection], quantization: Quantization, quantized: Quantized
) -> dict[str, Tensor]:
    """Allocate the weights on the meta device that are needed in floating point, by name."""
    places: dict[str, Tensor] = {}
    for linear, parts in projections:
        needed = [f"{part}.weight" for part in parts if f"{part}.weight" not in quantized]
        if needed and linear.materialise(quantization):
            found = linear.parts(parts)
            places |= {name: found[name] for name in needed}
    return places
