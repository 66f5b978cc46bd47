"""One linear layer of all experts of a mixture, each with a weight of its own and some of the rows."""

from itertools import pairwise

import torch
from torch import Tensor

from kernels.backends import ops_for
from kernels.ops import Ops
from worker_service.models.linear import Linear


class ExpertLinear:
    """`x[row] @ weights[expert].T`, where sums of a row are the same whatever other rows there are.

    Where the kernels multiply all experts at once, their weights are one stack, and `experts` are views of it that are
    filled one by one. Elsewhere each is packed alone, and only those that have rows are read; so no more than one
    expert's weight is in memory twice at any time.
    """

    def __init__(
        self,
        num_experts: int,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        wide: bool = False,
        deferred: bool = False,
        ops: Ops | None = None,
    ) -> None:
        """Allocates the weights, without values yet. wide, ops: as `Linear` has them; deferred: likewise, for weights
        that are no stack."""
        self._ops: Ops = ops or ops_for(device)
        self._wide = wide
        self._stack: Tensor | None = None
        if self._ops.GROUPED_PRODUCTS:
            self._stack = torch.empty(num_experts, outputs, inputs, dtype=dtype, device=device)
            weights = list(self._stack.unbind())
        else:
            place = "meta" if deferred else device
            weights = [torch.empty(outputs, inputs, dtype=dtype, device=place) for _ in range(num_experts)]
        self.experts = [Linear(weight, wide=wide, alike=True, device=device, ops=ops) for weight in weights]

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """x: [rows, inputs], at least one; ends: as `kernels.experts.ExpertRows` has them. Returns [rows, outputs]."""
        if self._stack is not None:
            return self._ops.grouped_linear(x, self._stack, ends, self._wide)
        stretches = zip(self.experts, pairwise([0, *ends.tolist()]), strict=True)
        return torch.cat([expert(x[start:stop]) for expert, (start, stop) in stretches if start < stop])
