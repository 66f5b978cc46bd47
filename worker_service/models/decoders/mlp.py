"""The second half of a decoder layer: a gated feed-forward network, or a mixture of experts without adapters."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from kernels.backends import ops_for
from kernels.linear.experts import choose_by_groups
from kernels.ops import Activation, Ops
from worker_service.models.decoders.decoder_config import DecoderConfig, Mixture
from worker_service.models.layers.expert_linear import ExpertLinear
from worker_service.models.layers.linear import Linear

Projection = tuple[Linear, dict[str, int]]
"""A linear layer of fused projections: their names in a checkpoint, and outputs of each."""

LATENT_PROJECTIONS = "mlp.fc1_latent_proj", "mlp.fc2_latent_proj"
"""Names of the projections around experts of latents, into a latent and back."""
_EXPERT_SCALES = "router.per_expert_scale"
"""Name of the factors on the outputs of each expert."""
SHARED_EXPERTS = "mlp.shared_experts"
"""Name of the shared experts in a checkpoint: one feed-forward network."""


class Mlp(Protocol):
    @property
    def projections(self) -> list[Projection]:
        """All linear layers."""

    @property
    def adapted(self) -> list[Projection]:
        """The linear layers that can have adapters."""

    @property
    def vectors(self) -> Mapping[str, Tensor]:
        """Tensors besides those of linear layers, by their names in a checkpoint."""

    def __call__(self, x: Tensor, adapter_slots: Tensor | None) -> Tensor:
        """x: [rows, hidden_size]; adapter_slots: see `Linear`. The caller sums the results of all ranks."""


def _activate(x: Tensor, activation: Activation, ops: Ops) -> Tensor:
    """x: gates beside the other units, or without gates ("relu2") all units; may be overwritten."""
    return x.relu_().square_() if activation == "relu2" else ops.gated_activation(x, activation)


class DenseMlp:
    """`down(activation(gate(x)) * up(x))` (Shazeer, 2020), or without gates `down(activation(up(x)))`."""

    def __init__(
        self,
        config: DecoderConfig,
        inner: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        adds_bias: bool,
        deferred: bool = False,
        ops: Ops | None = None,
        name: str = "mlp",
    ) -> None:
        """inner: this rank's inner units; deferred: see `Linear.allocate`; ops: see `Linear`. name: in a checkpoint,
        after the layer's prefix."""
        self._config, self._inner, self._ops, self._name = config, inner, ops or ops_for(device), name
        allocate = partial(Linear.allocate, dtype=dtype, device=device, deferred=deferred, ops=self._ops)
        hidden, wide = config.hidden_size, self._ops.WIDE_PRODUCTS
        self._gate_up = allocate((1 + config.gated_mlp) * inner, hidden, config.mlp_bias)
        self._down = allocate(hidden, inner, config.mlp_bias, wide=wide, adds_bias=adds_bias)

    vectors: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def projections(self) -> list[Projection]:
        name = self._name
        if not self._config.gated_mlp:
            gate_up = {f"{name}.up_proj": self._inner}
        elif self._config.fused_checkpoint or self._config.fused_gate_up:
            gate_up = {f"{name}.gate_up_proj": 2 * self._inner}
        else:
            gate_up = {f"{name}.gate_proj": self._inner, f"{name}.up_proj": self._inner}
        return [(self._gate_up, gate_up), (self._down, {f"{name}.down_proj": self._config.hidden_size})]

    @property
    def adapted(self) -> list[Projection]:
        return self.projections

    def __call__(self, x: Tensor, adapter_slots: Tensor | None) -> Tensor:
        activated = _activate(self._gate_up(x, adapter_slots), self._config.activation, self._ops)
        return self._down(activated, adapter_slots)


class MixtureMlp:
    """Adds up the outputs of the experts that a router chooses for a row, weighted by the router, and of shared
    experts, which all rows use. The router is float32, unquantised and whole on each rank, because small differences
    decide which experts a token uses. A rank holds a part of every expert."""

    def __init__(
        self,
        config: DecoderConfig,
        mixture: Mixture,
        inner: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        adds_bias: bool = True,
        deferred: bool = False,
        ops: Ops | None = None,
        shared: DenseMlp | None = None,
    ) -> None:
        """inner: this rank's inner units of an expert; adds_bias: whether this rank adds the biases of `down`;
        deferred, ops: see `ExpertLinear`. shared: the shared experts."""
        self._config, self._mixture, self._shared = config, mixture, shared
        self._ops: Ops = ops or ops_for(device)
        empty, biased = partial(torch.empty, mixture.num_experts, dtype=dtype, device=device), mixture.biased
        self._router = Linear(
            empty(config.hidden_size), empty() if biased else None, wide=True, batch_invariant=True, quantisable=False,
            ops=self._ops,
        )  # fmt: skip
        self._shared_gate: Linear | None = None
        if mixture.shared_gate:
            weight = torch.empty(1, config.hidden_size, dtype=dtype, device=device)
            self._shared_gate = Linear(weight, wide=True, batch_invariant=True, quantisable=False, ops=self._ops)
        self._bias: Tensor | None = None
        if (routing := mixture.routing) is not None and routing.is_sigmoid and routing.has_bias:
            self._bias = torch.empty(mixture.num_experts, device=device)  # float32, as the router's results
        self._scales = torch.empty(mixture.num_experts, dtype=dtype, device=device) if mixture.beside_dense else None
        allocate = partial(
            ExpertLinear, mixture.num_experts, dtype=dtype, device=device, biased=biased, deferred=deferred, ops=ops
        )
        size, wide = mixture.latent_size or config.hidden_size, self._ops.WIDE_PRODUCTS
        self._units = (1 + config.gated_mlp) * inner
        self._gate_up = allocate(self._units, size)
        self._down = allocate(size, inner, wide=wide, adds_bias=adds_bias)
        self._size, self._latents = size, list[Linear]()
        if mixture.latent_size is not None:
            linear = partial(Linear.allocate, dtype=dtype, device=device, deferred=deferred, ops=ops)
            into = linear(size, config.hidden_size, config.mlp_bias)
            self._latents = [into, linear(config.hidden_size, size, config.mlp_bias, wide=wide)]
        self._activation = mixture.activation or config.activation

    @property
    def projections(self) -> list[Projection]:
        names = self._mixture.names
        projections = [(self._router, {names.router: self._mixture.num_experts})]
        for number, (gate_up, down) in enumerate(zip(self._gate_up.experts, self._down.experts, strict=True)):
            expert = f"{names.experts}.{number}"
            fused = {f"{expert}.{name}": self._units // len(names.gate_up) for name in names.gate_up}
            projections += [(gate_up, fused), (down, {f"{expert}.{names.down}": self._size})]
        if self._shared_gate is not None:
            projections.append((self._shared_gate, {f"{SHARED_EXPERTS}_gate": 1}))
        return projections + self.adapted

    @property
    def adapted(self) -> list[Projection]:
        """Shared experts and the projections of latents can have adapters, but not experts."""
        sizes = self._size, self._config.hidden_size
        named = zip(self._latents, LATENT_PROJECTIONS, sizes, strict=True) if self._latents else ()
        latents: list[Projection] = [(linear, {name: size}) for linear, name, size in named]
        return latents + ([] if self._shared is None else self._shared.adapted)

    @property
    def vectors(self) -> dict[str, Tensor]:
        named = {f"{self._mixture.names.router}.e_score_correction_bias": self._bias, _EXPERT_SCALES: self._scales}
        return {name: vector for name, vector in named.items() if vector is not None}

    def __call__(self, x: Tensor, adapter_slots: Tensor | None, routed: Tensor | None = None) -> Tensor:
        """routed: the router's input; None for x. Returns float32."""
        logits = self._router(x if routed is None else routed)
        if (routing := self._mixture.routing) is not None:
            scores = self._sigmoid(logits) if routing.is_sigmoid else logits.softmax(1)
            weights, experts = choose_by_groups(scores, self._bias, routing)
        else:
            weights, experts = self._ops.choose_experts(logits, self._mixture.num_chosen, self._mixture.renormalise)
        if self._scales is not None:
            weights = weights * self._scales[experts]
        rows = self._ops.group_rows(experts, self._mixture.num_experts)
        inputs = (self._latents[0](x, adapter_slots) if self._latents else x).index_select(0, rows.tokens)
        if self._mixture.scales_inputs:
            of_rows = torch.empty_like(weights).flatten().scatter_(0, rows.places.flatten(), weights.flatten())
            inputs, weights = (inputs * of_rows[:, None]).to(x.dtype), torch.ones_like(weights)
        inner = self._gate_up(inputs, rows.ends)
        returned = self._down(_activate(inner, self._activation, self._ops), rows.ends)
        combined = self._ops.combine_rows(returned, rows.places, weights)
        if self._latents:
            combined = self._latents[1](combined.to(x.dtype), adapter_slots).float()
        if self._shared is None:
            return combined
        shared = self._shared(x, adapter_slots)
        if self._shared_gate is not None:
            shared = shared * self._sigmoid(self._shared_gate(x))
        return combined.add_(shared)

    def _sigmoid(self, x: Tensor) -> Tensor:
        """The kernels' sigmoid. torch's differs in the last bit at the end of a tensor, and so between batches."""
        return self._ops.gated_activation(torch.cat((x, torch.ones_like(x)), dim=1), "sigmoid")


class MlpBesideExperts:
    """The sum of a dense network and of experts, each with norms of its own around it (Gemma 4). The router reads the
    residual stream with a norm of its own, so that inputs are not normalised before."""

    def __init__(self, config: DecoderConfig, dense: DenseMlp, experts: MixtureMlp, ops: Ops, vector: Tensor) -> None:
        """vector: [hidden_size], of whose kind the norms' weights are allocated unfilled."""
        self._config, self._dense, self._experts, self._ops = config, dense, experts, ops
        names = (
            "pre_feedforward_layernorm.weight", "post_feedforward_layernorm_1.weight",
            "pre_feedforward_layernorm_2.weight", "post_feedforward_layernorm_2.weight", "router.scale",
        )  # fmt: skip
        self._norms = {name: vector.clone() for name in names}

    @property
    def projections(self) -> list[Projection]:
        return self._dense.projections + self._experts.projections

    @property
    def adapted(self) -> list[Projection]:
        return self._dense.adapted + self._experts.adapted

    @property
    def vectors(self) -> dict[str, Tensor]:
        return self._norms | self._experts.vectors

    def __call__(self, x: Tensor, adapter_slots: Tensor | None) -> Tensor:
        """x: not normalised. Returns float32."""
        norm = partial(self._ops.rms_norm, eps=self._config.rms_norm_eps)
        wide = partial(norm, dtype=torch.float32)
        dense_before, dense_after, before, after, of_router = self._norms.values()
        routed = (wide(x, of_router) * self._config.hidden_size**-0.5).to(x.dtype)
        dense = wide(self._dense(norm(x, dense_before), adapter_slots), dense_after)
        return dense.add_(wide(self._experts(norm(x, before), adapter_slots, routed), after))
