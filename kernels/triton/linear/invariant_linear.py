"""Batch-invariant `x @ weight.T + bias`: rows are summed over the inputs in the same order for any number of rows.

    `x`        [rows, inputs], contiguous.
    `result`   [rows, outputs], in the type of x or in float32.
    `weight`   [outputs, inputs], contiguous.
    `program`  Some rows by some outputs, with 64 inputs at a time, summed in float32 in order.

Libraries such as cuBLAS change tiles or split inputs with the number of rows. Here only the tile's size changes: few
rows need many programs that read weights, many rows need large tiles. Bits are equal if all tiles use one kind of
tensor core instruction: `mma` at compute capability 8, `wgmma` at 9.0, which needs 64 rows (`compile_for_gpus.py` of
the tests checks this). The kernel assumes that an instruction sums a row in the same order whatever the other rows and
outputs. Tile sizes are not tuned by measurement. Oracles: torch's product, and other rows.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import Product
from kernels.triton.attention.attention_tiles import HOPPER_SHARED_MEMORY, shared_memory
from kernels.triton.launch import OPTIONS

_DEPTH = 64


class _Tile(NamedTuple):
    """A tile's size, and compile options."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


_FEW_ROWS = _Tile(64, 32, 4, 6)
"""Up to 64 rows. Few outputs make many programs: 128 for 4,096 outputs. A pipeline stage takes 12 KiB of shared
memory."""
_SOME_ROWS = _Tile(128, 128, 8, 3)
"""Up to 512 rows; on GPUs with little shared memory, also more."""
_MANY_ROWS = _Tile(128, 256, 8, 3)
_FLOAT32 = _Tile(32, 64, 4, 2)
"""Small, because no tensor core multiplies float32 exactly, and registers are few."""


def pack(weight: Tensor, wide: bool = False) -> Product:
    """weight: [outputs, inputs], not copied. See `kernels.ops.Ops`."""
    return partial(invariant_linear, weight, wide)


def invariant_linear(weight: Tensor, wide: bool, x: Tensor, bias: Tensor | None) -> Tensor:
    """x: [rows, inputs]. Returns [rows, outputs], in float32 if `wide`."""
    outputs, inputs = weight.shape
    result = torch.empty((len(x), outputs), dtype=torch.float32 if wide else x.dtype, device=x.device)
    tile = _tile(len(x), x.dtype, x.device)
    if len(x):
        # Programs of the same outputs are neighbours, so that their weights stay in the GPU's cache.
        _invariant_linear_kernel[(triton.cdiv(len(x), tile.rows), triton.cdiv(outputs, tile.outputs))](
            x,
            weight,
            weight if bias is None else bias,  # unread without bias
            result,
            len(x),
            outputs,
            biased=bias is not None,
            inputs=inputs,
            tile_rows=tile.rows,
            tile_outputs=tile.outputs,
            depth=_DEPTH,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **OPTIONS,
        )
    return result


def _tile(rows: int, dtype: torch.dtype, device: torch.device) -> _Tile:
    if dtype is torch.float32:
        return _FLOAT32
    if rows <= _FEW_ROWS.rows:
        return _FEW_ROWS
    return _SOME_ROWS if rows <= 512 or shared_memory(device) < HOPPER_SHARED_MEMORY else _MANY_ROWS


@triton.jit(do_not_specialize=["rows"])
def _invariant_linear_kernel(
    x,
    weight,
    bias,
    result,
    rows,
    outputs,
    biased: tl.constexpr,
    inputs: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    depth: tl.constexpr,
):
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    place = tl.arange(0, depth)
    values_at = x + row.to(tl.int64)[:, None] * inputs + place[None, :]
    factors_at = weight + output.to(tl.int64)[None, :] * inputs + place[:, None]
    is_row, is_output = (row < rows)[:, None], (output < outputs)[None, :]
    sums = tl.zeros((tile_rows, tile_outputs), tl.float32)
    for start in range(0, inputs, depth):
        if inputs % depth == 0:
            values = tl.load(values_at + start, mask=is_row, other=0.0)
            factors = tl.load(factors_at + start, mask=is_output, other=0.0)
        else:
            inside = start + place < inputs
            values = tl.load(values_at + start, mask=is_row & inside[None, :], other=0.0)
            factors = tl.load(factors_at + start, mask=is_output & inside[:, None], other=0.0)
        sums = tl.dot(values, factors, sums, input_precision="ieee")
    if biased:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    result_at = result + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(result_at, sums.to(result.dtype.element_ty), mask=is_row & is_output)
