"""The operation `grouped_linear` for e4m3 weights: each row is multiplied by the weight of the row's expert. Both rows
and weights are 8-bit numbers with scales.

    `numbers`     [rows, inputs] e4m3, contiguous. The scales, `row_scales`, are [rows, groups] float32.
    `weights` [experts, outputs, inputs] e4m3, contiguous. The scales are [experts, outputs, groups] float32.
    `ends`        [experts] int64: the number of the row after each expert's last row.
    `result`      [rows, outputs], in the type of x or in float32.
    `program`     A program computes 16 rows of one expert by 64 outputs, over one group of inputs after the other.

If there is a single expert, a program computes up to 128 rows by 128 outputs. With several experts, the tile size is
the same for any number of rows, because larger tiles use other instructions, which may sum a row in another order. A
product of few rows waits for weights, and 8-bit weights have half as many bytes as 16-bit weights. e4m3 numbers are
multiplied as float16, which represents them exactly. The GPU's products of e4m3 are not used, because their sums have
fewer bits than float32. The sums of each group are scaled, and then added to the sums of earlier groups. The tile sizes
have not been tuned by measurement. The kernel requires compute capability 8.9, for the instruction that converts e4m3
to float16.

The oracle is `kernels.linear.experts.grouped_float8`. The tests cover experts without rows, one row, 129 rows with one
expert, groups of 16 and of 48 inputs, 123 inputs in one group, and one output.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.float8 import Float8Weight, round_inputs
from kernels.triton.launch import OPTIONS
from kernels.triton.linear.grouped_linear import most_blocks, place_of_block
from kernels.triton.linear.round_rows import round_rows

_MAX_DEPTH = 128


class _Tile(NamedTuple):
    rows: int
    outputs: int
    num_warps: int


_TILES = (_Tile(16, 64, 4), _Tile(64, 64, 4), _Tile(128, 128, 8))


def grouped_float8(x: Tensor, weight: Float8Weight, ends: Tensor, wide: bool = False) -> Tensor:
    """See `kernels.linear.experts.grouped_float8`."""
    num_experts, outputs, inputs = weight.numbers.shape
    groups = weight.scales.shape[2]
    result = torch.empty((len(x), outputs), dtype=torch.float32 if wide else x.dtype, device=x.device)
    numbers, row_scales = round_inputs(x, weight._replace(scales=weight.scales[0]), round_rows)
    tile = next((tile for tile in _TILES if num_experts > 1 or tile.rows >= len(x)), _TILES[-1])
    if blocks := most_blocks(len(x), num_experts, tile.rows):
        _grouped_float8_kernel[(triton.cdiv(outputs, tile.outputs), blocks)](
            numbers, row_scales, weight.numbers, weight.scales, ends, result, num_experts, outputs,
            groups=groups, size=inputs // groups,
            experts=triton.next_power_of_2(num_experts),
            rows=tile.rows, tile=tile.outputs,
            depth=max(16, min(_MAX_DEPTH, triton.next_power_of_2(inputs // groups))),
            num_warps=tile.num_warps, **OPTIONS,
        )  # fmt: skip
    return result


@triton.jit
def _grouped_float8_kernel(
    numbers, row_scales, weights, scales, ends, result, num_experts, outputs,
    groups: tl.constexpr, size: tl.constexpr, experts: tl.constexpr,
    rows: tl.constexpr, tile: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    mine, first, last = place_of_block(tl.program_id(1), ends, num_experts, experts, rows)
    if mine >= num_experts:
        return
    row = (first + tl.arange(0, rows)).to(tl.int64)
    column = (tl.program_id(0) * tile + tl.arange(0, tile)).to(tl.int64)
    factors = weights + mine.to(tl.int64) * outputs * (groups * size)
    factor_scales = scales + mine.to(tl.int64) * outputs * groups
    sums = tl.zeros((rows, tile), dtype=tl.float32)
    for group in range(groups):
        part = tl.zeros((rows, tile), dtype=tl.float32)
        for start in range(0, size, depth):
            within = start + tl.arange(0, depth)
            place = group * size + within
            values = tl.load(
                numbers + row[:, None] * (groups * size) + place[None, :],
                mask=(row < last)[:, None] & (within < size)[None, :],
                other=0.0,
            )
            factor = tl.load(
                factors + column[None, :] * (groups * size) + place[:, None],
                mask=(column < outputs)[None, :] & (within < size)[:, None],
                other=0.0,
            )
            part = tl.dot(values.to(tl.float16), factor.to(tl.float16), part)
        of_columns = tl.load(factor_scales + column * groups + group, mask=column < outputs, other=0.0)
        of_rows = tl.load(row_scales + row * groups + group, mask=row < last, other=0.0)
        sums += part * of_columns[None, :] * of_rows[:, None]
    tl.store(
        result + row[:, None] * outputs + column[None, :],
        sums.to(result.dtype.element_ty),
        mask=(row < last)[:, None] & (column < outputs)[None, :],
    )
