"""The second half of a decoder layer: a gated feed-forward network, or a mixture of experts without adapters."""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kernels.backends import ops_for
from kernels.linear.experts import choose_experts, group_rows
from kernels.ops import Ops
from worker_service.models.decoders.decoder_config import DecoderConfig, Mixture
from worker_service.models.layers.expert_linear import ExpertLinear
from worker_service.models.layers.linear import Linear

Projection = tuple[Linear, dict[str, int]]
"""A linear layer of fused projections: their names in a checkpoint, and outputs of each."""


class Mlp(Protocol):
    @property
    def projections(self) -> list[Projection]:
        """All linear layers."""

    @property
    def adapted(self) -> list[Projection]:
        """The linear layers that can have adapters."""

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
    ) -> None:
        """inner: this rank's inner units; deferred: see `Linear.allocate`; ops: see `Linear`."""
        self._config, self._inner, self._ops = config, inner, ops or ops_for(device)
        allocate = partial(Linear.allocate, dtype=dtype, device=device, deferred=deferred, ops=self._ops)
        hidden, wide = config.hidden_size, self._ops.WIDE_PRODUCTS
        self._gate_up = allocate(2 * inner, hidden, config.mlp_bias)
        self._down = allocate(hidden, inner, config.mlp_bias, wide=wide, adds_bias=adds_bias)

    @property
    def projections(self) -> list[Projection]:
        if self._config.fused_checkpoint:
            gate_up = {"mlp.gate_up_proj": 2 * self._inner}
        else:
            gate_up = {"mlp.gate_proj": self._inner, "mlp.up_proj": self._inner}
        return [(self._gate_up, gate_up), (self._down, {"mlp.down_proj": self._config.hidden_size})]

    @property
    def adapted(self) -> list[Projection]:
        return self.projections

    def __call__(self, x: Tensor, adapter_slots: Tensor | None) -> Tensor:
        activated = self._ops.gated_activation(self._gate_up(x, adapter_slots), self._config.activation)
        return self._down(activated, adapter_slots)


class MixtureMlp:
    """Adds up the outputs of the experts that a router chooses for a row, weighted by the router. The router is
    float32, unquantised and whole on each rank, because small differences decide which experts a token uses. A rank
    holds a part of every expert."""

    def __init__(
        self,
        config: DecoderConfig,
        mixture: Mixture,
        inner: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        deferred: bool = False,
        ops: Ops | None = None,
    ) -> None:
        """inner: this rank's inner units of an expert; deferred, ops: see `ExpertLinear`."""
        self._config, self._mixture, self._inner = config, mixture, inner
        self._ops: Ops = ops or ops_for(device)
        router = torch.empty(mixture.num_experts, config.hidden_size, dtype=dtype, device=device)
        self._router = Linear(router, wide=True, batch_invariant=True, quantisable=False, ops=self._ops)
        allocate = partial(ExpertLinear, mixture.num_experts, dtype=dtype, device=device, deferred=deferred, ops=ops)
        self._gate_up = allocate(2 * inner, config.hidden_size)
        self._down = allocate(config.hidden_size, inner, wide=self._ops.WIDE_PRODUCTS)

    @property
    def projections(self) -> list[Projection]:
        names = self._mixture.names
        projections = [(self._router, {names.router: self._mixture.num_experts})]
        for number, (gate_up, down) in enumerate(zip(self._gate_up.experts, self._down.experts, strict=True)):
            expert = f"{names.experts}.{number}"
            fused = {f"{expert}.{names.gate}": self._inner, f"{expert}.{names.up}": self._inner}
            projections += [(gate_up, fused), (down, {f"{expert}.{names.down}": self._config.hidden_size})]
        return projections

    @property
    def adapted(self) -> list[Projection]:
        """Experts cannot have adapters."""
        return []

    def __call__(self, x: Tensor, adapter_slots: Tensor | None) -> Tensor:  # noqa: ARG002 (`DenseMlp` uses it)
        """Returns float32."""
        weights, experts = choose_experts(self._router(x), self._mixture.num_chosen, self._mixture.renormalise)
        rows = group_rows(experts, self._mixture.num_experts)
        inner = self._gate_up(x.index_select(0, rows.tokens), rows.ends)
        returned = self._down(self._ops.gated_activation(inner, self._config.activation), rows.ends)
        return self._ops.combine_rows(returned, rows.places, weights)
