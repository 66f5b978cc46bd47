"""A linear layer for all experts of a mixture, each with its own weight and rows."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kernels.backends import ops_for
from kernels.float8 import Float8Weight, quantize_float8
from kernels.ops import Ops, QuantizedWeight
from worker_service.models.layers.linear import Linear, Quantization, joined


class ExpertLinear:
    """`x[row] @ weights[expert].T + biases[expert]` for each row with its expert, batch-invariant. If the kernels
    multiply all experts in one call, weights are one tensor (the stack). Otherwise each is packed by itself, and a step
    reads only experts with rows. While weights are loaded, at most one expert's weight is in memory in two copies."""

    def __init__(
        self,
        num_experts: int,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        biased: bool = False,
        wide: bool = False,
        adds_bias: bool = True,
        deferred: bool = False,
        ops: Ops | None = None,
    ) -> None:
        """Allocate weights unfilled. wide, adds_bias, ops: see `Linear`; deferred: see `Linear.allocate`."""
        self._ops: Ops = ops or ops_for(device)
        self._wide = wide
        self._stack: _Stack | None = None
        numbers, place = range(num_experts), "meta" if deferred else device
        biases = torch.empty(num_experts, outputs, dtype=dtype, device=device) if biased else None
        self._added = biases if adds_bias else None
        bias_of = [None if biases is None else biases[number] for number in numbers]
        if self._ops.GROUPED_PRODUCTS:
            self._stack = stack = _Stack(num_experts, outputs, inputs, dtype, device)
            whole = torch.empty(num_experts, outputs, inputs, dtype=dtype, device="meta") if deferred else stack.wide()
            self.experts: list[Linear] = [
                _Stacked(whole[number], bias_of[number], stack, number, self._ops) for number in numbers
            ]
        else:
            weights = [torch.empty(outputs, inputs, dtype=dtype, device=place) for _ in numbers]
            self.experts = [
                Linear(weight, bias, wide=wide, adds_bias=adds_bias, batch_invariant=True, device=device, ops=ops)
                for weight, bias in zip(weights, bias_of, strict=True)
            ]

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """x: [rows, inputs], at least one row, sorted by expert. ends: see `kernels.ops.ExpertRows`. Returns [rows,
        outputs]."""
        if self._stack is not None:
            narrow = self._stack.narrow
            if narrow is not None:
                found = self._ops.grouped_float8(x, narrow, ends, self._wide)
            else:
                found = self._ops.grouped_linear(x, self._stack.wide(), ends, self._wide)
            if self._added is not None:
                expert = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
                found += self._added.index_select(0, expert)
            return found
        stretches = zip(self.experts, pairwise([0, *ends.tolist()]), strict=True)
        return torch.cat([expert(x[start:stop]) for expert, (start, stop) in stretches if start < stop])


class _Stack:
    """All experts' weights in one tensor, allocated with the first weight that is stored."""

    def __init__(self, num_experts: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self.device = (num_experts, outputs, inputs), dtype, device
        self._wide: Tensor | None = None
        self.narrow: Float8Weight | None = None
        """fp8: numbers [num_experts, outputs, inputs], scales [num_experts, outputs, groups]."""
        self._has_wide = False

    def wide(self) -> Tensor:
        """[num_experts, outputs, inputs] in floating point."""
        if self._wide is None:
            self._wide = torch.empty(self._shape, dtype=self._dtype, device=self.device)
        return self._wide

    def keep_wide(self) -> None:
        """Record that an expert's weight stays in floating point. Raises ValueError if another is in fp8."""
        self._has_wide = True
        self._check()

    def put(self, number: int, weight: Float8Weight) -> None:
        """Store an expert in fp8. Raises ValueError if another has other scales, or is not in fp8."""
        groups = weight.scales.shape[1]
        if self.narrow is None:
            self._wide = None  # experts keep views until `pack`
            numbers = torch.empty(self._shape, dtype=weight.numbers.dtype, device=self.device)
            scales = torch.empty((*self._shape[:2], groups), dtype=torch.float32, device=self.device)
            self.narrow = Float8Weight(numbers, scales)
        self._check(groups)
        self.narrow.numbers[number].copy_(weight.numbers)
        self.narrow.scales[number].copy_(weight.scales)

    def _check(self, groups: int | None = None) -> None:
        known = None if self.narrow is None else self.narrow.scales.shape[2]
        if (self._has_wide and known is not None) or (groups is not None and groups != known):
            raise ValueError(
                "the experts of a layer are quantised in different ways, which these kernels do not support"
            )


class _Stacked(Linear):
    """One expert's layer. `pack` stores its weight in the stack."""

    def __init__(self, weight: Tensor, bias: Tensor | None, stack: _Stack, number: int, ops: Ops) -> None:
        super().__init__(weight, bias, device=stack.device, ops=ops)
        self._stack, self._number = stack, number

    def materialise(self, quantization: Quantization = "none") -> bool:
        """See `Linear.materialise`. Weights that stay in floating point are parts of the stack."""
        if quantization == "fp8" or not self.weight.is_meta:
            return super().materialise(quantization)
        self.weight = self._stack.wide()[self._number]
        return True

    def pack(self, quantization: Quantization = "none") -> None:
        if quantization in ("none", "gguf"):
            self._stack.keep_wide()
        elif quantization == "fp8":
            self._put(quantize_float8(self.weight))
        else:
            raise ValueError(f"these kernels do not support a stack of experts in {quantization}")

    def pack_parts(self, parts: Sequence[QuantizedWeight | None], sizes: Sequence[int]) -> None:
        self.check_parts(parts, sizes)
        weight = joined(parts)
        if not isinstance(weight, Float8Weight) or weight.input_scale is not None:
            raise ValueError("these kernels do not support a stack of such experts")
        self._put(weight)

    def _put(self, weight: Float8Weight) -> None:
        self._stack.put(self._number, weight)
        self.free()
