"""`x @ weight.T` for all experts of a mixture in one launch.

    `x`         [rows, inputs], contiguous, grouped by expert.
    `weights`   [experts, outputs, inputs], contiguous.
    `ends`      [experts] int64: the number of the row after each expert's last row. Only the device reads `ends`.
    `result`    [rows, outputs], in the type of x or in float32.
    `program`   One tile of rows of one expert by outputs, with some inputs at a time.

The grid depends on shapes only, so a CUDA graph serves any choice of experts, and the host does not wait. Fewer
programs than experts have no rows. Larger tiles use instructions that may sum in another order, so batch-invariant
products have one tile for any number of rows; on an H200, all tiles gave the same bits. Oracle:
`kernels.linear.experts.grouped_linear`.

Tiles were chosen on an H200, of 100 for each size, with 128 experts of 1,536 x 2,048 in bf16: 65,536 rows take 0.72 ms
(and 3.2 ms in tiles of 16 by 64), 8 rows 23 µs (and 30), each in the median of a run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attention.attention_tiles import HOPPER_SHARED_MEMORY, shared_memory
from kernels.triton.launch import OPTIONS


class Tile(NamedTuple):
    rows: int
    outputs: int
    inputs: int
    num_warps: int = 4
    num_stages: int = 3


_SMALL, _FEW, _SOME, _MANY = Tile(16, 64, 64), Tile(16, 64, 128), Tile(64, 128, 64, 4, 4), Tile(128, 256, 64, 8, 4)


def grouped_linear(x: Tensor, weights: Tensor, ends: Tensor, wide: bool = False) -> Tensor:
    return _multiply(x, weights, ends, wide, _tile(len(x) // len(weights), x.dtype, x.device))


def invariant_grouped_linear(x: Tensor, weights: Tensor, ends: Tensor, wide: bool = False) -> Tensor:
    """`grouped_linear`, batch-invariant."""
    return _multiply(x, weights, ends, wide, _SMALL)


def _tile(rows_of_expert: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """rows_of_expert: the mean."""
    if dtype is torch.float32 or shared_memory(device) < HOPPER_SHARED_MEMORY:
        return _SMALL
    return _FEW if rows_of_expert < 16 else _SOME if rows_of_expert < 128 else _MANY


def _multiply(x: Tensor, weights: Tensor, ends: Tensor, wide: bool, tile: Tile) -> Tensor:
    num_experts, outputs, inputs = weights.shape
    result = torch.empty((len(x), outputs), dtype=torch.float32 if wide else x.dtype, device=x.device)
    if blocks := most_blocks(len(x), num_experts, tile.rows):
        _grouped_linear_kernel[(triton.cdiv(outputs, tile.outputs), blocks)](
            x, weights, ends, result, num_experts, outputs, inputs,
            experts=triton.next_power_of_2(num_experts),
            rows=tile.rows, tile=tile.outputs, depth=tile.inputs,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **OPTIONS,
        )  # fmt: skip
    return result


def most_blocks(num_rows: int, num_experts: int, size: int) -> int:
    """Maximum of blocks of up to `size` rows: an expert has full blocks, and at most one partial."""
    return (num_rows + min(num_experts, num_rows) * (size - 1)) // size


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
