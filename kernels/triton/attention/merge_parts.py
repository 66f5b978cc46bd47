"""Merges a query row's results for parts of the keys, in order, by online softmax.

    `partial`   [num_tokens, num_heads, room, head_dim] float32: values weighted by `2^(score - largest)`.
    `sums`      [num_tokens, num_heads, room, 2] float32: each part's largest score (log2), and its sum of weights.
    `counts`    [num_tokens, num_heads] int32: a row's parts, the first of `room` entries.
    `sinks`     [num_heads] float32: a score of each head, before all parts, whose value is zero; or None.
    `output`    [num_tokens, num_heads, head_dim].
    `program`   One head of one token.

Programs with all parts of a row also use `merge_part`, and get the same bits: its explicit roundings keep a compiler
from fusing a product and a sum in one kernel only. Rows without parts are zero.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import OPTIONS, num_warps


def merge_parts(partial: Tensor, sums: Tensor, counts: Tensor, sinks: Tensor | None, output: Tensor) -> None:
    num_tokens, num_heads, room, head_dim = partial.shape
    columns = triton.next_power_of_2(head_dim)
    _merge_parts_kernel[(num_tokens, num_heads)](
        partial, sums, counts, sums if sinks is None else sinks, output, num_heads, room,
        has_sinks=sinks is not None, head_dim=head_dim, columns=columns, num_warps=num_warps(columns), **OPTIONS,
    )  # fmt: skip


@triton.jit
def merge_part(largest, total, weighted, part_largest, part_total, part_weighted):
    """Merge a part into all earlier ones. largest, total: [rows]; weighted: [rows, columns]."""
    new_largest = tl.maximum(largest, part_largest)
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # before any key
    shrink, grow = tl.exp2(largest - base), tl.exp2(part_largest - base)
    total = tl.fma(total, shrink, part_total * grow)
    weighted = tl.fma(weighted, shrink[:, None] + tl.zeros_like(weighted), part_weighted * grow[:, None])
    return new_largest, total, weighted


@triton.jit
def begun(sinks):
    """The largest score (log2) and the sum of weights of rows with only a sink. sinks: [rows]."""
    return sinks * 1.4426950408889634, tl.full(sinks.shape, 1.0, tl.float32)


@triton.jit
def finished(total, weighted):
    """The result of rows with all parts merged; zero without keys."""
    divisor = tl.where(total == 0, 1.0, total)
    return weighted * tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)[:, None]


@triton.jit(do_not_specialize=["room"])
def _merge_parts_kernel(
    partial, sums, counts, sinks, output, num_heads, room,
    has_sinks: tl.constexpr, head_dim: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    column = tl.arange(0, columns)[None, :]
    one = tl.zeros([1], tl.int64)
    if has_sinks:
        largest, total = begun(tl.load(sinks + tl.program_id(1) + one))
    else:
        largest = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
    weighted = tl.zeros([1, columns], tl.float32)
    for part in range(tl.load(counts + row)):
        place = row * room + part
        part_largest, part_total = tl.load(sums + place * 2 + one), tl.load(sums + place * 2 + 1 + one)
        part_weighted = tl.load(partial + place * head_dim + column, mask=column < head_dim, other=0.0)
        largest, total, weighted = merge_part(largest, total, weighted, part_largest, part_total, part_weighted)
    result = finished(total, weighted)
    tl.store(output + row * head_dim + column, result.to(output.dtype.element_ty), mask=column < head_dim)
