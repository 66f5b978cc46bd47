"""A layer of the native decoder. Each half (attention, then an MLP) reads the residual stream and adds to it."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.ops import Ops
from worker_service.models.causal_model import Fill, LayerPlace
from worker_service.models.decoders.attention import AttentionHalf, ByPosition, LatentAttention, QkvAttention
from worker_service.models.decoders.decoder_config import DecoderConfig, LayerConfig
from worker_service.models.decoders.mlp import SHARED_EXPERTS, DenseMlp, MixtureMlp, Mlp, MlpBesideExperts, Projection
from worker_service.models.decoders.shard import Shard
from worker_service.models.decoders.states.halves import ConvolutionHalf, DeltaHalf, MambaHalf
from worker_service.models.layers.linear import Quantization, Quantized
from worker_service.models.layers.mixers import DeltaNet, Mamba2, ShortConvolution
from worker_service.models.layers.per_layer import PerLayerHalf
from worker_service.parallel.ranks import Ranks


class _Norms(NamedTuple):
    """The norms around a half; None where there is none."""

    before: Tensor | None
    after: Tensor | None


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
        self._config, self._ops, self._ranks, self._dtype = config, ops, ranks, dtype

        def norms(exist: bool, *, before: bool = config.pre_norms) -> _Norms:
            """Unfilled."""
            sides = exist and before, exist and config.post_norms
            return _Norms(
                *(torch.empty(config.hidden_size, dtype=dtype, device=device) if has else None for has in sides)
            )

        is_beside = layer.mixture is not None and layer.mixture.beside_dense
        self._attention_norms = norms(layer.attends)
        self._mlp_norms = norms(layer.has_mlp, before=config.pre_norms and not is_beside)
        self._attention: AttentionHalf | None = None
        if layer.attends:
            self._attention = _first_half(config, layer, dtype, device, ranks, shard, ops, deferred)
        self._mlp: Mlp | None = None
        if layer.has_mlp:
            self._mlp = _second_half(config, layer, dtype, device, ranks, shard, ops, deferred)
        self._per_layer: PerLayerHalf | None = None
        if config.per_layer is not None:
            sizes, activation = (config.hidden_size, config.per_layer.size), config.activation
            self._per_layer = PerLayerHalf(sizes, activation, dtype, device, ops, deferred=deferred)
            self._per_layer_norms = _Norms(None, torch.empty(config.hidden_size, dtype=dtype, device=device))
        self._scale = torch.empty(1, dtype=dtype, device=device) if config.layer_scales else None

    @property
    def projections(self) -> list[Projection]:
        """All linear layers."""
        return self._named([one for half in self._halves for one in half.projections])

    @property
    def adapted(self) -> list[Projection]:
        """The linear layers that can have adapters."""
        return self._named([one for half in self._halves for one in half.adapted])

    @property
    def _halves(self) -> list[AttentionHalf | Mlp | PerLayerHalf]:
        return [half for half in (self._attention, self._mlp, self._per_layer) if half is not None]

    def _named(self, projections: list[Projection]) -> list[Projection]:
        name = self._config.name
        return [(linear, {name(part): size for part, size in parts.items()}) for linear, parts in projections]

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """See `Loadable.checkpoint_tensors`. Names are without the layer's prefix."""
        before_mlp = "pre_feedforward_layernorm" if self._config.post_norms else "post_attention_layernorm"
        norms: dict[str, Tensor | None] = {
            "input_layernorm": self._attention_norms.before,
            "post_attention_layernorm": self._attention_norms.after,
            before_mlp: self._mlp_norms.before,
            "post_feedforward_layernorm": self._mlp_norms.after,
        }
        if self._per_layer is not None:
            norms["post_per_layer_input_norm"] = self._per_layer_norms.after
        tensors = {f"{name}.weight": norm for name, norm in norms.items() if norm is not None}
        if self._scale is not None:
            tensors["layer_scalar"] = self._scale
        for half in self._halves:
            tensors |= half.vectors
        tensors = {self._config.name(name): tensor for name, tensor in tensors.items()}
        for linear, names in self.projections:
            tensors |= linear.parts(names)
        return tensors

    def forward(
        self,
        delta: Tensor | None,
        residual: Tensor,
        by_position: ByPosition,
        place: LayerPlace | None,
        adapter_slots: Tensor | None,
        per_layer: Tensor | None = None,
    ) -> Tensor:
        """Add `delta` and all outputs but the last half's to `residual` in place; return the last half's. delta:
        [num_tokens, hidden_size], the previous layer's result, or None. residual: [num_tokens, hidden_size] float32.
        place: None if the layer has no first half. per_layer: see `PerLayerHalf`."""
        if self._attention is not None:
            assert place is not None
            x = self._entering(delta, residual, self._attention_norms)
            delta = self._leaving(self._attention(x, by_position, *place, adapter_slots), self._attention_norms)
        if self._mlp is not None:
            x = self._entering(delta, residual, self._mlp_norms)
            delta = self._leaving(self._mlp(x, adapter_slots), self._mlp_norms)
        if self._per_layer is not None:
            assert per_layer is not None
            x = self._entering(delta, residual, self._per_layer_norms)
            delta = self._leaving(self._per_layer(x, per_layer, adapter_slots), self._per_layer_norms)
        assert delta is not None  # every layer has a half
        if self._scale is not None:
            residual *= self._scale
            delta = delta * self._scale
        return delta

    def _entering(self, delta: Tensor | None, residual: Tensor, norms: _Norms) -> Tensor:
        """Add `delta` to `residual` in place. Returns the input of a half."""
        config, ops = self._config, self._ops
        if norms.before is None:
            if delta is not None:
                residual += delta
            return residual.to(self._dtype)
        if delta is None:
            return ops.rms_norm(residual, norms.before, config.rms_norm_eps, config.norm_offset)
        return ops.add_rms_norm(delta, residual, norms.before, config.rms_norm_eps, config.norm_offset)

    def _leaving(self, output: Tensor, norms: _Norms) -> Tensor:
        """The sum that a half adds to the residual stream. output: this rank's."""
        config = self._config
        delta = self._ranks.all_reduce(output)
        if norms.after is not None:
            delta = self._ops.rms_norm(delta, norms.after, config.rms_norm_eps, config.norm_offset, torch.float32)
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
    attention = QkvAttention if config.latent is None else LatentAttention
    return attention(config, layer, dtype, device, ranks, shard, ops, deferred=deferred)


def _second_half(
    config: DecoderConfig,
    layer: LayerConfig,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
    shard: Shard,
    ops: Ops,
    deferred: bool,
) -> Mlp:
    adds_bias = ranks.rank == 0
    dense = partial(DenseMlp, config, dtype=dtype, device=device, adds_bias=adds_bias, deferred=deferred, ops=ops)
    if (mixture := layer.mixture) is None:
        return dense(len(shard.inner))
    inner = len(shard.expert_inner)
    shared = dense(len(shard.shared_inner), name=SHARED_EXPERTS) if mixture.shared_size else None
    experts = MixtureMlp(
        config, mixture, inner, dtype, device, adds_bias=adds_bias, deferred=deferred, ops=ops, shared=shared
    )
    if not mixture.beside_dense:
        return experts
    vector = torch.empty(config.hidden_size, dtype=dtype, device=device)
    return MlpBesideExperts(config, dense(len(shard.inner)), experts, ops, vector)


def pack_layer(
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
