"""The second half of a decoder layer: a gated feed-forward network, or a mixture of experts without adapters."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from kernels.backends import ops_for
from kernels.linear.experts import choose_by_groups, choose_experts, group_rows
from kernels.ops import Ops
from worker_service.models.decoders.decoder_config import DecoderConfig, Mixture
from worker_service.models.layers.expert_linear import ExpertLinear
from worker_service.models.layers.linear import Linear

Projection = tuple[Linear, dict[str, int]]
"""A linear layer of fused projections: their names in a checkpoint, and outputs of each."""

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


class DenseMlp:
    """`down(activation(gate(x)) * up(x))` (Shazeer, 2020)."""

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
        self._gate_up = allocate(2 * inner, hidden, config.mlp_bias)
        self._down = allocate(hidden, inner, config.mlp_bias, wide=wide, adds_bias=adds_bias)

    vectors: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def projections(self) -> list[Projection]:
        name = self._name
        if self._config.fused_checkpoint or self._config.fused_gate_up:
            gate_up = {f"{name}.gate_up_proj": 2 * self._inner}
        else:
            gate_up = {f"{name}.gate_proj": self._inner, f"{name}.up_proj": self._inner}
        return [(self._gate_up, gate_up), (self._down, {f"{name}.down_proj": self._config.hidden_size})]

    @property
    def adapted(self) -> list[Projection]:
        return self.projections

    def __call__(self, x: Tensor, adapter_slots: Tensor | None) -> Tensor:
        activated = self._ops.gated_activation(self._gate_up(x, adapter_slots), self._config.activation)
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
        self._config, self._mixture, self._inner, self._shared = config, mixture, inner, shared
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
        allocate = partial(
            ExpertLinear, mixture.num_experts, dtype=dtype, device=device, biased=biased, deferred=deferred, ops=ops
        )
        self._gate_up = allocate(2 * inner, config.hidden_size)
        self._down = allocate(config.hidden_size, inner, wide=self._ops.WIDE_PRODUCTS, adds_bias=adds_bias)
        self._activation = mixture.activation or config.activation

    @property
    def projections(self) -> list[Projection]:
        names = self._mixture.names
        projections = [(self._router, {names.router: self._mixture.num_experts})]
        for number, (gate_up, down) in enumerate(zip(self._gate_up.experts, self._down.experts, strict=True)):
            expert = f"{names.experts}.{number}"
            fused = {f"{expert}.{name}": 2 * self._inner // len(names.gate_up) for name in names.gate_up}
            projections += [(gate_up, fused), (down, {f"{expert}.{names.down}": self._config.hidden_size})]
        if self._shared_gate is not None:
            projections.append((self._shared_gate, {f"{SHARED_EXPERTS}_gate": 1}))
        return projections + ([] if self._shared is None else self._shared.projections)

    @property
    def adapted(self) -> list[Projection]:
        """Only shared experts can have adapters."""
        return [] if self._shared is None else self._shared.adapted

    @property
    def vectors(self) -> dict[str, Tensor]:
        name = f"{self._mixture.names.router}.e_score_correction_bias"
        return {} if self._bias is None else {name: self._bias}

    def __call__(self, x: Tensor, adapter_slots: Tensor | None) -> Tensor:
        """Returns float32."""
        if (routing := self._mixture.routing) is not None:
            logits = self._router(x)
            scores = self._sigmoid(logits) if routing.is_sigmoid else logits.softmax(1)
            weights, experts = choose_by_groups(scores, self._bias, routing)
        else:
            weights, experts = choose_experts(self._router(x), self._mixture.num_chosen, self._mixture.renormalise)
        rows = group_rows(experts, self._mixture.num_experts)
        inner = self._gate_up(x.index_select(0, rows.tokens), rows.ends)
        returned = self._down(self._ops.gated_activation(inner, self._activation), rows.ends)
        combined = self._ops.combine_rows(returned, rows.places, weights)
        if self._shared is None:
            return combined
        shared = self._shared(x, adapter_slots)
        if self._shared_gate is not None:
            shared = shared * self._sigmoid(self._shared_gate(x))
        return combined.add_(shared)

    def _sigmoid(self, x: Tensor) -> Tensor:
        """The kernels' sigmoid. torch's differs in the last bit at the end of a tensor, and so between batches."""
        return self._ops.gated_activation(torch.cat((x, torch.ones_like(x)), dim=1), "sigmoid")
