"""Quantises rows to e4m3: `scale = max |x| / 448`, `numbers = x / scale`.

    `x`         [rows, n], contiguous.
    `numbers`   [rows, n] e4m3.
    `scales`    [rows, 1] float32.
    `program`   One row.

Eager torch would launch seven kernels before each of a layer's four products. Needs compute capability 8.9. Oracle:
`kernels.float8.round_rows`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.float8 import FLOAT8, LARGEST, MIN_SCALE
from kernels.triton.launch import OPTIONS, num_warps


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [rows, n]."""
    rows, width = x.shape
    numbers = torch.empty(x.shape, dtype=FLOAT8, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    columns = triton.next_power_of_2(width)
    if rows:
        _round_rows_kernel[(rows,)](
            x,
            numbers,
            scales,
            largest=LARGEST,
            least_scale=MIN_SCALE,
            width=width,
            columns=columns,
            num_warps=num_warps(columns),
            **OPTIONS,
        )
    return numbers, scales


@triton.jit
def _round_rows_kernel(
    x,
    numbers,
    scales,
    largest: tl.constexpr,
    least_scale: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, columns)
    inside = column < width
    wide = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    # Rounded as in torch: a scale off by its last bit would change numbers halfway between two e4m3 numbers.
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(wide), axis=0), largest), least_scale)
    found = tl.clamp(tl.div_rn(wide, scale), -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    tl.store(numbers + row * width + column, found.to(numbers.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)
