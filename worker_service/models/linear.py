"""A linear layer whose weights can be packed once for the products of a step."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernels.ops import ops_for


class Linear:
    """`x @ weight.T + bias`. weight: [outputs, inputs]; bias: [outputs] or None.

    Where the sum over the ranks is wanted, only one of them adds the bias, though all of them load it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, adds_bias: bool = True) -> None:
        self.weight = weight
        self.bias = bias
        self._added = bias if adds_bias else None
        self._product: Callable[[Tensor, Tensor | None], Tensor] | None = None

    @classmethod
    def allocate(
        cls,
        outputs: int,
        inputs: int,
        biased: bool,
        dtype: torch.dtype,
        device: torch.device,
        *,
        adds_bias: bool = True,
    ) -> "Linear":
        """Without values yet."""
        bias = torch.empty(outputs, dtype=dtype, device=device) if biased else None
        return cls(torch.empty(outputs, inputs, dtype=dtype, device=device), bias, adds_bias=adds_bias)

    def pack(self, int8: bool = False) -> None:
        """Take the weights as they are now, where packing helps, and let go of them then."""
        ops = ops_for(self.weight.device)
        self._product = (ops.pack_int8 if int8 else ops.pack)(self.weight)
        if self._product is not None:
            self.weight = self.weight.new_empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, inputs]; returns [rows, outputs]."""
        if self._product is None:
            return functional.linear(x, self.weight, self._added)
        return self._product(x, self._added)

    def parts(self, names: dict[str, int]) -> dict[str, Tensor]:
        """Names for consecutive slices of the outputs, given their sizes."""
        weights = dict(zip(names, torch.split(self.weight, list(names.values())), strict=True))
        tensors = {f"{name}.weight": weight for name, weight in weights.items()}
        if self.bias is not None:
            biases = dict(zip(names, torch.split(self.bias, list(names.values())), strict=True))
            tensors |= {f"{name}.bias": bias for name, bias in biases.items()}
        return tensors
