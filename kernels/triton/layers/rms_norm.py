"""RMSNorm, alone or after an addition: `x / sqrt(mean(x²) + eps) * (weight + offset)` over the last dimension.

    `x` [..., width], with contiguous rows and any other strides, so that heads of fused projections are not copied.
    `tile`    [rows, width padded to a power of two]. A program reads whole rows once, into registers.

Residual and computations are float32. Oracles: `kernels.reference.rms_norm` and `add_rms_norm`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import OPTIONS, num_warps

_TILE = 2048
"""Elements of a tile, at least. Otherwise, each head of 64 would have a program."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
    output = torch.empty(x.shape, dtype=dtype or weight.dtype, device=x.device)
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() != 3:
        x = x.reshape(1, -1, x.shape[-1])  # copies x if its strides cannot be merged
    _normalise(x, None, weight, output, eps, offset)
    return output


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    output = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    _normalise(x[None], residual, weight, output, eps, offset)
    return output


def _normalise(x: Tensor, residual: Tensor | None, weight: Tensor, output: Tensor, eps: float, offset: float) -> None:
    """x: [n, m, width]; residual: [n * m, width] or None; output: n * m rows of `width` elements, in any shape."""
    num_rows, width = x.shape[0] * x.shape[1], x.shape[2]
    if num_rows == 0:
        return
    columns = triton.next_power_of_2(width)
    rows = max(1, _TILE // columns)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        x if residual is None else residual,
        weight,
        output,
        num_rows,
        x.shape[1],
        x.stride(0),
        x.stride(1),
        0 if residual is None else residual.stride(0),
        eps,
        offset,
        adds=residual is not None,
        width=width,
        rows=rows,
        columns=columns,
        num_warps=num_warps(rows * columns),
        **OPTIONS,
    )


@triton.jit(do_not_specialize=["num_rows", "inner_rows"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    output,
    num_rows,
    inner_rows,
    outer_stride,
    inner_stride,
    residual_stride,
    eps,
    offset,
    adds: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)[None, :]
    inside = (row < num_rows)[:, None] & (column < width)
    wide_row = row.to(tl.int64)
    start = wide_row // inner_rows * outer_stride + wide_row % inner_rows * inner_stride
    wide = tl.load(x + start[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    if adds:
        places = residual + wide_row[:, None] * residual_stride + column
        wide += tl.load(places, mask=inside, other=0.0)
        tl.store(places, wide, mask=inside)
    inverse_root = tl.rsqrt(tl.sum(wide * wide, axis=1) / width + eps)
    factors = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    normed = wide * inverse_root[:, None] * factors
    tl.store(output + wide_row[:, None] * width + column, normed.to(output.dtype.element_ty), mask=inside)
