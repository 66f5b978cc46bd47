"""`grouped_linear` for e4m3: each row times its expert's weight, with scales for both.

    `numbers`     [rows, inputs] e4m3, contiguous; scales `row_scales` [rows, groups] float32.
    `weights`     [experts, outputs, inputs] e4m3, contiguous; scales [experts, outputs, groups] float32.
    `ends`        [experts] int64: the number of the row after each expert's last row.
    `result`      [rows, outputs], in the type of x or in float32.
    `program`     16 rows of one expert by 64 outputs (one expert: up to 128 by 128), group after group.

With several experts, the tile is the same for any number of rows: larger tiles use instructions that may sum in another
order. Few rows wait for weights, which have half the bytes of 16 bits. Numbers are multiplied as float16, which is
exact: a GPU's e4m3 sums have fewer bits than float32. Tile sizes are not tuned by measurement. Needs compute capability
8.9 for the conversion. Oracle: `kernels.linear.experts.grouped_float8`.
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
