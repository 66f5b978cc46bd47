"""`x @ weight.T + bias` for one row of x, nearly at the bandwidth of device memory.

    `x`        [rows, inputs], contiguous. For any number of rows but one, torch's product is used.
    `result`   [rows, outputs], in the type of x or in float32.
    `weight`   [outputs, inputs], contiguous.
    `program`  One output, with one tile of inputs at a time, summed in float32.

Libraries multiply one row like 8, and split the inputs of small weights, with a second pass. H200, bf16, 4,096 x 4,096:
12.7 µs with cuBLAS, 9.5 µs here, 7.9 µs for reading the weight. Oracle: torch's product.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.ops import Product
from kernels.reference import wide_linear
from kernels.triton.launch import OPTIONS, num_warps

_TILE = 2048


def pack(weight: Tensor, wide: bool = False) -> Product:
    """weight: [outputs, inputs], not copied. See `kernels.ops.Ops`."""
    return partial(linear, weight, wide)


def linear(weight: Tensor, wide: bool, x: Tensor, bias: Tensor | None) -> Tensor:
    """x: [rows, inputs]. Returns [rows, outputs], in float32 if `wide`."""
    if len(x) != 1:
        return wide_linear(x, weight, bias) if wide else functional.linear(x, weight, bias)
    outputs, inputs = weight.shape
    result = torch.empty((1, outputs), dtype=torch.float32 if wide else x.dtype, device=x.device)
    tile = min(_TILE, triton.next_power_of_2(inputs))
    _row_times_matrix_kernel[(outputs,)](
        x,
        weight,
        weight if bias is None else bias,  # unread without bias
        result,
        biased=bias is not None,
        width=inputs,
        tile=tile,
        num_warps=num_warps(2 * tile),
        **OPTIONS,
    )
    return result


@triton.jit
def _row_times_matrix_kernel(x, weight, bias, result, biased: tl.constexpr, width: tl.constexpr, tile: tl.constexpr):
    output = tl.program_id(0).to(tl.int64)
    sums = tl.zeros([tile], tl.float32)
    for start in range(0, width, tile):
        column = start + tl.arange(0, tile)
        values = tl.load(x + column, mask=column < width, other=0.0).to(tl.float32)
        factors = tl.load(weight + output * width + column, mask=column < width, other=0.0).to(tl.float32)
        sums += factors * values
    total = tl.sum(sums, axis=0)
    if biased:
        total += tl.load(bias + output).to(tl.float32)
    tl.store(result + output, total.to(result.dtype.element_ty))
