"""Finds the token with the largest logit of each row, in one pass. Among equal logits, the lowest id wins. NaN counts
as +inf.

    `logits`    [rows, vocabulary_size], any stride between rows.
    `program`   reads 8,192 columns of one row, so that a single row occupies several multiprocessors.
    `partial`   the largest logit and its column, [rows, parts] float32 and int32; the input of `pick`.

Oracle: `kernels.sampling.eager.greedy`. The largest logit is not finite if the row has NaN or +inf, or only -inf. Edge
cases: one row, vocabularies of 1, 8,193 and 123 tokens, all logits equal.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import OPTIONS, num_warps
from kernels.triton.sampling.pick import pick

_COLUMNS = 8192


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.sampling.eager.greedy`."""
    rows, vocabulary_size = logits.shape
    columns = min(_COLUMNS, triton.next_power_of_2(vocabulary_size))
    parts = triton.cdiv(vocabulary_size, columns)
    values = torch.empty((rows, parts), device=logits.device)
    ids = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    if rows:
        _greedy_kernel[(rows, parts)](
            logits,
            values,
            ids,
            vocabulary_size,
            logits.stride(0),
            columns=columns,
            num_warps=num_warps(columns),
            **OPTIONS,
        )
    return pick(values, ids)


@triton.jit
def _greedy_kernel(logits, values, ids, vocabulary_size, row_stride, columns: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * columns + tl.arange(0, columns)
    logit = tl.load(logits + row * row_stride + column, mask=column < vocabulary_size, other=float("-inf"))
    logit = logit.to(tl.float32)
    logit = tl.where(logit != logit, float("inf"), logit)  # only NaN is unequal to itself
    largest = tl.max(logit, axis=0)
    tl.store(values + row * tl.num_programs(1) + part, largest)
    tl.store(ids + row * tl.num_programs(1) + part, tl.min(tl.where(logit == largest, column, 0x7FFFFFFF), axis=0))
