"""The second half of a decoder's layer: a gated feed-forward network, or a mixture of several of them.

The experts of a mixture take adapters no more than its router does: only a dense network does.
"""

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
"""A product, with the names in a checkpoint and the numbers of outputs of what is fused into it."""


class Mlp(Protocol):
    """What a layer needs of either."""

    @property
    def projections(self) -> list[Projection]:
        """All products."""

    @property
    def adapted(self) -> list[Projection]:
        """Those that adapters may add to."""

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        """x: [rows, hidden_size]; lora_slots: as `Linear` has it. Returns this rank's summand of the result."""


class DenseMlp:
    """`down(activation(gate(x)) * up(x))`. (Shazeer, 2020.)"""

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
        """inner: this rank's part of the intermediate size; deferred, ops: as `Linear` has them."""
        self._config, self._inner, self._ops = config, inner, ops or ops_for(device)
        allocate = partial(Linear.allocate, dtype=dtype, device=device, deferred=deferred, ops=self._ops)
        hidden, wide = config.hidden_size, self._ops.WIDE_PRODUCTS
        self._gate_up = allocate(2 * inner, hidden, config.mlp_bias)
        self._down = allocate(hidden, inner, config.mlp_bias, wide=wide, adds_bias=adds_bias)

    @property
    def projections(self) -> list[Projection]:
        """As `Mlp` has it."""
        if self._config.fused_checkpoint:
            gate_up = {"mlp.gate_up_proj": 2 * self._inner}
        else:
            gate_up = {"mlp.gate_proj": self._inner, "mlp.up_proj": self._inner}
        return [(self._gate_up, gate_up), (self._down, {"mlp.down_proj": self._config.hidden_size})]

    @property
    def adapted(self) -> list[Projection]:
        """As `Mlp` has it."""
        return self.projections

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        """As `Mlp` has it."""
        activated = self._ops.gated_activation(self._gate_up(x, lora_slots), self._config.activation)
        return self._down(activated, lora_slots)


class MixtureMlp:
    """A router that chooses some of several experts for each row, and the sum of what these return, by its weights.

    The router's logits are float32, and it is not quantised with others: a token's experts hang on small differences.
    Each rank holds a part of every expert, and the router whole.
    """

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
        """inner: this rank's part of an expert's intermediate size; deferred, ops: as `ExpertLinear` has them."""
        self._config, self._mixture, self._inner = config, mixture, inner
        self._ops: Ops = ops or ops_for(device)
        router = torch.empty(mixture.num_experts, config.hidden_size, dtype=dtype, device=device)
        self._router = Linear(router, wide=True, alike=True, quantisable=False, ops=self._ops)
        allocate = partial(ExpertLinear, mixture.num_experts, dtype=dtype, device=device, deferred=deferred, ops=ops)
        self._gate_up = allocate(2 * inner, config.hidden_size)
        self._down = allocate(config.hidden_size, inner, wide=self._ops.WIDE_PRODUCTS)

    @property
    def projections(self) -> list[Projection]:
        """As `Mlp` has it."""
        names = self._mixture.names
        projections = [(self._router, {names.router: self._mixture.num_experts})]
        for number, (gate_up, down) in enumerate(zip(self._gate_up.experts, self._down.experts, strict=True)):
            expert = f"{names.experts}.{number}"
            fused = {f"{expert}.{names.gate}": self._inner, f"{expert}.{names.up}": self._inner}
            projections += [(gate_up, fused), (down, {f"{expert}.{names.down}": self._config.hidden_size})]
        return projections

    @property
    def adapted(self) -> list[Projection]:
        """As `Mlp` has it."""
        return []

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:  # noqa: ARG002 (dense ones use it)
        """As `Mlp` has it, in float32."""
        weights, experts = choose_experts(self._router(x), self._mixture.num_chosen, self._mixture.renormalise)
        rows = group_rows(experts, self._mixture.num_experts)
        inner = self._gate_up(x.index_select(0, rows.tokens), rows.ends)
        returned = self._down(self._ops.gated_activation(inner, self._config.activation), rows.ends)
        return self._ops.combine_rows(returned, rows.places, weights)
