"""Products by e4m3 weights on a GPU, by `torch._scaled_mm` where possible.

`_scaled_mm` needs inputs and outputs in multiples of 16, and compute capability 8.9. With scales for rows and outputs,
the result can only be bfloat16, so for other types scales are applied afterwards. Even without use_fast_accum, an H100
keeps about 14 bits of a sum. Weights with scales for groups of inputs use `grouped_float8`, as one expert. Other GPUs
and sizes multiply in bfloat16: exact, but twice the memory. Oracle: `kernels.reference.pack_float8`.
"""

from functools import cache, partial

import torch
from torch import Tensor

from kernels.float8 import FLOAT8_CAPABILITY, Float8Weight, float8_product, product_in_16_bits, round_inputs
from kernels.ops import Product
from kernels.triton.linear.grouped_float8 import grouped_float8
from kernels.triton.linear.linear import pack
from kernels.triton.linear.round_rows import round_rows


@cache
def multiplies_float8(device: torch.device) -> bool:
    """Whether the device multiplies e4m3."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


def pack_float8(weight: Float8Weight, wide: bool = False) -> Product:
    (outputs, inputs), groups = weight.numbers.shape, weight.scales.shape[1]
    if not multiplies_float8(weight.numbers.device) or (groups == 1 and (outputs % 16 or inputs % 16)):
        return product_in_16_bits(weight, pack, wide)
    if groups > 1:
        return partial(_of_groups, Float8Weight(weight.numbers[None], weight.scales[None]), wide)
    factors, scales = weight.numbers.T, weight.scales.T.contiguous()
    one = torch.ones((), device=factors.device)

    def multiply(numbers: Tensor) -> Tensor:
        return torch._scaled_mm(numbers, factors, one, one, out_dtype=torch.float32, use_fast_accum=False)

    scaled_after = float8_product(weight, [multiply], wide, round_rows)

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        if wide or x.dtype is not torch.bfloat16:
            return scaled_after(x, bias)
        numbers, row_scales = round_inputs(x, weight, round_rows)
        return torch._scaled_mm(
            numbers, factors, row_scales, scales, bias=bias, out_dtype=x.dtype, use_fast_accum=False
        )

    return product


def _of_groups(weight: Float8Weight, wide: bool, x: Tensor, bias: Tensor | None) -> Tensor:
    ends = torch.full((1,), len(x), dtype=torch.int64, device=x.device)
    found = grouped_float8(x, weight, ends, wide or bias is not None)
    return found if bias is None else (found + bias).to(torch.float32 if wide else x.dtype)
