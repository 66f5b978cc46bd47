"""Finds the smallest scaled logit of each row that passes min_p, top_k and top_p, without sorting or a wait of the
host.

    `logits`       [rows, vocabulary_size], of any float type, with any stride between rows.
    `distance`     (largest - logit) / temperature; not negative, so distances sort like their bits.
    `weight(K)`    Sum over logits that passed earlier filters, with distance bits below K: 1 for top_k,
                   exp(-distance) for top_p.
    `threshold`    Largest K with weight(K) < k, or weight(K) < p times the weight of all logits. Distance bits up to K
                   pass.

A pass reduces K's interval to a quarter, so a filter takes at most 16 passes, and none without top_k and top_p. One
program computes one row, which is in the GPU's cache after the first pass.

Oracle: `kernels.sampling.filters.filter_thresholds`. It sums in another order, so if likelier tokens sum to almost
exactly top_p, the results may differ by a token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.eager import Draws
from kernels.triton.launch import OPTIONS, num_warps

_COLUMNS = 4096


def filter_thresholds(logits: Tensor, largest: Tensor, draws: Draws) -> Tensor:
    """Threshold of `(logit - largest) / temperature` for each draw, [draws] float32. largest: [rows]."""
    thresholds = torch.empty(len(draws.rows), device=logits.device)
    columns = min(_COLUMNS, triton.next_power_of_2(logits.shape[1]))
    if len(thresholds):
        _filter_thresholds_kernel[(len(thresholds),)](
            logits,
            largest,
            draws.rows,
            draws.temperature,
            draws.min_p,
            draws.top_k,
            draws.top_p,
            thresholds,
            logits.shape[1],
            logits.stride(0),
            columns=columns,
            num_warps=num_warps(columns),
            **OPTIONS,
        )
    return thresholds


@triton.jit
def _filter_thresholds_kernel(
    logits,
    largest,
    rows,
    temperatures,
    min_p,
    top_k,
    top_p,
    thresholds,
    vocabulary_size,
    row_stride,
    columns: tl.constexpr,
):
    infinity: tl.constexpr = 0x7F800000  # the bits of +inf
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number)
    temperature = tl.load(temperatures + number)
    top = tl.load(largest + row).to(tl.float32)
    start = logits + row * row_stride

    least = tl.load(min_p + number)
    # -log(1) is -0, whose bits as an integer are not small.
    floor = tl.where(least > 0, tl.abs(tl.log(tl.where(least > 0, least, 1.0))), float("inf"))
    limit = floor.to(tl.int32, bitcast=True)
    rank = tl.load(top_k + number)
    if (rank > 0) & (rank < vocabulary_size):
        found = _search(start, top, temperature, infinity, rank.to(tl.float32), vocabulary_size, False, columns)
        limit = tl.minimum(limit, found)
    share = tl.load(top_p + number)
    if share < 1:
        mass = _weights(
            start, top, temperature, limit, infinity + 1, infinity + 1, infinity + 1, vocabulary_size, True, columns
        )[0]
        limit = tl.minimum(limit, _search(start, top, temperature, limit, share * mass, vocabulary_size, True, columns))
    tl.store(thresholds + number, -limit.to(tl.float32, bitcast=True))


@triton.jit
def _search(start, top, temperature, limit, wanted, vocabulary_size, by_mass: tl.constexpr, columns: tl.constexpr):
    """The largest K with weight(K) < wanted, counting distance bits up to `limit`."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0x7F800001, tl.int32)  # above the bits of every distance
    while high - low > 1:  # always weight(low) < wanted; and weight(high) >= wanted if any K has that
        step = (high - low + 3) // 4
        cuts = low + step, low + 2 * step, low + 3 * step
        first, second, third = _weights(
            start, top, temperature, limit, cuts[0], cuts[1], cuts[2], vocabulary_size, by_mass, columns
        )
        steps = (
            ((first < wanted) & (cuts[0] < high)).to(tl.int32)
            + ((second < wanted) & (cuts[1] < high)).to(tl.int32)
            + ((third < wanted) & (cuts[2] < high)).to(tl.int32)
        )
        low += steps * step
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def _weights(
    start,
    top,
    temperature,
    limit,
    first,
    second,
    third,
    vocabulary_size,
    by_mass: tl.constexpr,
    columns: tl.constexpr,
):
    """weight(K) for three values of K in one pass."""
    first_sums = tl.zeros([columns], tl.float32)
    second_sums = tl.zeros([columns], tl.float32)
    third_sums = tl.zeros([columns], tl.float32)
    for begin in range(0, vocabulary_size, columns):
        column = begin + tl.arange(0, columns)
        logit = tl.load(start + column, mask=column < vocabulary_size, other=float("-inf"))
        distance = tl.div_rn(top - logit.to(tl.float32), temperature + tl.zeros([columns], tl.float32))
        bits = distance.to(tl.int32, bitcast=True)
        weight = tl.exp(-distance) if by_mass else tl.full([columns], 1.0, tl.float32)
        weight = tl.where((bits <= limit) & (column < vocabulary_size), weight, 0.0)
        first_sums += tl.where(bits < first, weight, 0.0)
        second_sums += tl.where(bits < second, weight, 0.0)
        third_sums += tl.where(bits < third, weight, 0.0)
    return tl.sum(first_sums, axis=0), tl.sum(second_sums, axis=0), tl.sum(third_sums, axis=0)
