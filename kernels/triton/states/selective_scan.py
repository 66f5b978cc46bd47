"""State space model of Mamba and Mamba-2, token by token: `S = exp(dt A) S + dt x Bᵀ` and `S C + D x`.

    `x`         [num_tokens, heads, size], with any stride between tokens. A head has `size` rows of S.
    `dt`        [num_tokens, heads] or [num_tokens, heads, size].
    `a`         [heads] or [heads, size, columns]; `d` [heads], [heads, size] or None.
    `b, c`      [num_tokens, groups, columns] in x's type, with any stride between tokens.
    `states`    [num_blocks, heads, size, columns] float32, with any stride between blocks.
    `result`    [num_tokens, heads, size] in x's type, contiguous.
    `program`   All tokens of one sequence, for a tile of one group's rows of S, which stays in registers.

Sums are float32, over all columns in one warp. Their order depends on the tile, and the tile on shapes only: for one
network, one compiled kernel serves all steps. Oracle: `kernels.states.selective_scan`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.inputs import AttentionMetadata
from kernels.triton.launch import OPTIONS
from kernels.triton.states.sequences import sequence_at

_TILE = 1024
"""Elements of a tile, 32 for each thread."""


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    states: Tensor,
    metadata: AttentionMetadata,
) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_sequences, (num_tokens, heads, size), (groups, columns) = len(metadata.context_lens), x.shape, b.shape[1:]
    if num_sequences and num_tokens:
        rows, width = heads * size // groups, triton.next_power_of_2(columns)
        tile = min(max(1, _TILE // width), triton.next_power_of_2(rows))
        a = a.contiguous()
        _selective_scan_kernel[(triton.cdiv(rows, tile), groups, num_sequences)](
            x, dt.contiguous(), a, b, c, a if d is None else d.contiguous(), states, result,
            metadata.query_start, metadata.context_lens, metadata.block_tables,
            x.stride(0), b.stride(0), c.stride(0), states.stride(0), metadata.block_tables.stride(0),
            heads=heads, size=size, rows=rows, columns=columns,
            dt_by_row=dt.dim() == 3, a_by_number=a.dim() == 3,
            has_d=d is not None, d_by_row=d is not None and d.dim() == 2,
            tile=tile, width=width, num_warps=1, **OPTIONS,
        )  # fmt: skip
    return result


@triton.jit(do_not_specialize=["x_stride", "b_stride", "c_stride", "state_stride", "table_stride"])
def _selective_scan_kernel(
    x, dt, a, b, c, d, states, result, query_start, context_lens, block_tables,
    x_stride, b_stride, c_stride, state_stride, table_stride,
    heads: tl.constexpr, size: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    dt_by_row: tl.constexpr, a_by_number: tl.constexpr, has_d: tl.constexpr, d_by_row: tl.constexpr,
    tile: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(2).to(tl.int64)
    first, end, block, reads, writes = sequence_at(number, query_start, context_lens, block_tables, table_stride)
    group = tl.program_id(1)
    of_group = tl.program_id(0) * tile + tl.arange(0, tile)
    exists = of_group < rows
    part = group * rows + of_group  # a row of S, in all heads
    head = part // size
    column = tl.arange(0, width)
    inside = column < columns
    in_state = exists[:, None] & inside[None, :]
    places = part[:, None] * columns + column[None, :]
    stored = states + block * state_stride + places
    state = tl.zeros([tile, width], tl.float32)
    if reads:
        state = tl.load(stored, mask=in_state, other=0.0)
    if a_by_number:
        rates = tl.load(a + places, mask=in_state, other=0.0).to(tl.float32)
    else:
        rates = tl.load(a + head, mask=exists, other=0.0).to(tl.float32)[:, None]
    if has_d:
        skip = tl.load(d + (part if d_by_row else head), mask=exists, other=0.0).to(tl.float32)
    for row in range(first, end):
        inputs = tl.load(x + row * x_stride + part, mask=exists, other=0.0).to(tl.float32)
        if dt_by_row:
            step = tl.load(dt + row * (heads * size) + part, mask=exists, other=0.0).to(tl.float32)
        else:
            step = tl.load(dt + row * heads + head, mask=exists, other=0.0).to(tl.float32)
        enters = tl.load(b + row * b_stride + group * columns + column, mask=inside, other=0.0).to(tl.float32)
        leaves = tl.load(c + row * c_stride + group * columns + column, mask=inside, other=0.0).to(tl.float32)
        state *= tl.exp(step[:, None] * rates)
        change = tl.broadcast_to((step * inputs)[:, None], tile, width)
        state = tl.fma(change, tl.broadcast_to(enters[None, :], tile, width), state)
        out = tl.sum(state * leaves[None, :], axis=1)
        if has_d:
            out = tl.fma(skip, inputs, out)
        tl.store(result + row * (heads * size) + part, out.to(result.dtype.element_ty), mask=exists)
    if writes:
        tl.store(stored, state, mask=in_state)
