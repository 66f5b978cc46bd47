"""Batch-invariant `x @ weight.T + bias`: a row is summed over the inputs in one order, for any number of rows.

    x        [rows, inputs], contiguous
    result   [rows, outputs], of x's type or float32
    weight   [outputs, inputs], contiguous
    program  some rows and some outputs, over the inputs, 64 at a time

Libraries choose another kernel for another number of rows: another tile, or parts of the inputs that are added up
afterwards. Here one program sums up all inputs in float32, in their order, 64 at a time. There are a few tile sizes:
few rows need many programs that read weights, and many rows need large tiles. Bits are equal only if all tiles use the
same kind of instruction, which takes the inputs in the same steps of 16. That is `mma` for compute capability 8 and
`wgmma` for 9.0. `wgmma` needs 64 rows, so no tile of 16-bit types has fewer. `tests/kernels/compile_for_gpus.py` reads
the instructions of every tile. An instruction is assumed to sum up a row the same way for any other rows and outputs.
The tiles are no measured choice.

Oracle: torch's product, and its own bits with other rows. Edge cases: 123 inputs, one output, no row, 65 rows.
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
    """The size of a program's tile, and its compile options."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


_FEW_ROWS = _Tile(64, 32, 4, 6)
"""Tile for up to 64 rows. Few outputs make many programs: 128 for a weight of 4,096, with stages of 12 KiB."""
_SOME_ROWS = _Tile(128, 128, 8, 3)
"""Tile for up to 512 rows, as in decodes of a large batch; for more rows only if shared memory is small."""
_MANY_ROWS = _Tile(128, 256, 8, 3)
_FLOAT32 = _Tile(32, 64, 4, 2)
"""The one tile for float32: no tensor core multiplies float32 exactly, and registers are few."""


def pack(weight: Tensor, wide: bool = False) -> Product:
    """See `kernels.ops.Ops`: the product with a weight, [outputs, inputs], which is not copied."""
    return partial(invariant_linear, weight, wide)


def invariant_linear(weight: Tensor, wide: bool, x: Tensor, bias: Tensor | None) -> Tensor:
    """x: [rows, inputs]; returns [rows, outputs], in float32 if `wide`."""
    outputs, inputs = weight.shape
    result = torch.empty((len(x), outputs), dtype=torch.float32 if wide else x.dtype, device=x.device)
    tile = _tile(len(x), x.dtype, x.device)
    if len(x):
        # Programs of the same outputs are neighbours, and share their reads of the weights.
        _invariant_linear_kernel[(triton.cdiv(len(x), tile.rows), triton.cdiv(outputs, tile.outputs))](
            x,
            weight,
            weight if bias is None else bias,  # not read without a bias
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
