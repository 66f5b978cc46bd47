"""`x @ weight.T` for all experts of a mixture in one launch.

    `x`         [rows, inputs], contiguous, grouped by expert.
    `weights`   [experts, outputs, inputs], contiguous.
    `ends`      [experts] int64: the number of the row after each expert's last row. Only the device reads `ends`.
    `result`    [rows, outputs], in the type of x or in float32.
    `program`   Up to 16 rows of one expert by 64 outputs, with 64 inputs at a time.

The grid depends on shapes only, so a CUDA graph serves any choice of experts, and the host does not wait. Fewer
programs than experts have no rows. The tile is the same for any number of rows: larger tiles use instructions that may
sum in another order. Tile sizes are not tuned by measurement. Oracle: `kernels.linear.experts.grouped_linear`.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import Product
from kernels.triton.launch import OPTIONS

_ROWS = 16
_OUTPUTS = 64
_INPUTS = 64


def grouped_linear(x: Tensor, weights: Tensor, ends: Tensor, wide: bool = False) -> Tensor:
    num_experts, outputs, inputs = weights.shape
    result = torch.empty((len(x), outputs), dtype=torch.float32 if wide else x.dtype, device=x.device)
    if blocks := most_blocks(len(x), num_experts, _ROWS):
        _grouped_linear_kernel[(triton.cdiv(outputs, _OUTPUTS), blocks)](
            x, weights, ends, result, num_experts, outputs, inputs,
            experts=triton.next_power_of_2(num_experts),
            rows=_ROWS, tile=_OUTPUTS, depth=_INPUTS, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return result


def most_blocks(num_rows: int, num_experts: int, size: int) -> int:
    """Maximum of blocks of up to `size` rows: an expert has full blocks, and at most one partial."""
    return (num_rows + min(num_experts, num_rows) * (size - 1)) // size


def pack_batch_invariant(weight: Tensor, wide: bool = False) -> Product:
    """A product as of a mixture with one expert."""
    return partial(_linear, weight[None], wide)


def _linear(weights: Tensor, wide: bool, x: Tensor, bias: Tensor | None) -> Tensor:
    ends = torch.full((1,), len(x), dtype=torch.int64, device=x.device)
    product = grouped_linear(x, weights, ends, wide)
    return product if bias is None else product + bias


@triton.jit
def place_of_block(block, ends, num_experts, experts: tl.constexpr, rows: tl.constexpr):
    """A block's expert, first row, and the row after the expert's last. Blocks are numbered expert after expert.
    Numbers after the last block give `num_experts` or more."""
    expert = tl.arange(0, experts)
    begin = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < num_experts), other=0).to(tl.int32)
    end = tl.load(ends + expert, mask=expert < num_experts, other=0).to(tl.int32)
    blocks = tl.where(expert < num_experts, (end - begin + rows - 1) // rows, 0)
    behind = tl.cumsum(blocks, axis=0)
    mine = tl.sum((behind <= block).to(tl.int32), axis=0)
    is_mine = expert == mine
    first = tl.sum(tl.where(is_mine, begin + (block - behind + blocks) * rows, 0), axis=0)
    last = tl.sum(tl.where(is_mine, end, 0), axis=0)
    return mine, first, last


@triton.jit
def _grouped_linear_kernel(
    x, weights, ends, result, num_experts, outputs, inputs,
    experts: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    mine, first, last = place_of_block(tl.program_id(1), ends, num_experts, experts, rows)
    if mine >= num_experts:
        return
    row = (first + tl.arange(0, rows)).to(tl.int64)
    column = tl.program_id(0) * tile + tl.arange(0, tile)
    factors = weights + mine.to(tl.int64) * outputs * inputs
    sums = tl.zeros((rows, tile), dtype=tl.float32)
    for start in range(0, inputs, depth):
        place = start + tl.arange(0, depth)
        inside = place < inputs
        values = tl.load(
            x + row[:, None] * inputs + place[None, :], mask=(row < last)[:, None] & inside[None, :], other=0.0
        )
        factor = tl.load(
            factors + column[None, :] * inputs + place[:, None],
            mask=(column < outputs)[None, :] & inside[:, None],
            other=0.0,
        )
        sums = tl.dot(values, factor, sums, input_precision="ieee")
    tl.store(
        result + row[:, None] * outputs + column[None, :],
        sums.to(result.dtype.element_ty),
        mask=(row < last)[:, None] & (column < outputs)[None, :],
    )
