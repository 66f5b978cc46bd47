"""Finds the largest logit of each row in one pass; among equals the lowest token id.

    `logits`    [rows, vocabulary_size], with any stride between rows.
    `program`   8,192 columns of one row, so that a single row occupies several multiprocessors.
    `partial`   Input of `pick`: each program's largest logit and its column, [rows, parts] float32 and int32.

NaN counts as +inf. Oracle: `kernels.sampling.eager.greedy`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import OPTIONS, num_warps
from kernels.triton.sampling.pick import pick

_COLUMNS = 8192


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
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
    logit = tl.where(logit != logit, float("inf"), logit)  # NaN only
    largest = tl.max(logit, axis=0)
    tl.store(values + row * tl.num_programs(1) + part, largest)
    tl.store(ids + row * tl.num_programs(1) + part, tl.min(tl.where(logit == largest, column, 0x7FFFFFFF), axis=0))
