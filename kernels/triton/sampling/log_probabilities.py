"""Log-probabilities of a given token and the likeliest tokens: `(logit - max) - log(sum(exp(logit - max)))`.

    `logits`    [rows, vocabulary_size], of any float type, with any stride between rows.
    `program`   4,096 columns of one row.
    `partial`   [rows, parts, 3]: maximum, sum of `exp(logit - maximum)`, and number of logits above the given token's.

A second kernel merges parts (Milakov and Gimelshein, 2018). Eager torch would write two float32 matrices of the
vocabulary's width. torch's topk finds the likeliest tokens. Oracle: `kernels.sampling.log_probabilities`, whose ranks
may differ, because it ranks rounded log-probabilities in place of logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.log_probabilities import largest_in_order
from kernels.triton.launch import OPTIONS, num_warps

_COLUMNS = 4096


def log_probabilities(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocabulary_size = logits.shape
    largest, log_sums = torch.empty((2, rows, 1), device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    columns = min(_COLUMNS, triton.next_power_of_2(vocabulary_size))
    parts = triton.cdiv(vocabulary_size, columns)
    partial = torch.empty((rows, parts, 3), device=logits.device)
    if rows:
        _part_kernel[(rows, parts)](
            logits,
            token_ids,
            partial,
            vocabulary_size,
            logits.stride(0),
            columns=columns,
            num_warps=num_warps(columns),
            **OPTIONS,
        )
        _join_kernel[(rows,)](
            partial, largest, log_sums, ranks, parts, columns=triton.next_power_of_2(parts), num_warps=1, **OPTIONS
        )
    top, top_ids = largest_in_order(logits, num_top)
    ids = torch.cat((token_ids[:, None], top_ids), dim=1)
    chosen = torch.cat((logits.gather(1, token_ids[:, None]), top), dim=1)
    return ids, chosen.float() - largest - log_sums, ranks


@triton.jit
def _part_kernel(logits, token_ids, partial, vocabulary_size, row_stride, columns: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    logit = tl.load(start + column, mask=column < vocabulary_size, other=float("-inf")).to(tl.float32)
    chosen = tl.load(start + tl.load(token_ids + row)).to(tl.float32)
    largest = tl.max(logit, axis=0)
    base = tl.where(largest == float("-inf"), 0.0, largest)  # all -inf: the sum is 0
    place = partial + (row * tl.num_programs(1) + tl.program_id(1)) * 3
    tl.store(place, largest)
    tl.store(place + 1, tl.sum(tl.exp(logit - base), axis=0))
    tl.store(place + 2, tl.sum((logit > chosen).to(tl.float32), axis=0))  # at most 4,096, exact in float32


@triton.jit
def _join_kernel(partial, largest, log_sums, ranks, parts, columns: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, columns)
    place = partial + (row * parts + part) * 3
    part_largest = tl.load(place, mask=part < parts, other=float("-inf"))
    sums = tl.load(place + 1, mask=part < parts, other=0.0)
    likelier = tl.load(place + 2, mask=part < parts, other=0.0)
    top = tl.max(part_largest, axis=0)
    total = tl.sum(sums * tl.exp(part_largest - tl.where(top == float("-inf"), 0.0, top)), axis=0)
    tl.store(largest + row, top)
    tl.store(log_sums + row, tl.log(total))
    tl.store(ranks + row, tl.sum(likelier.to(tl.int64), axis=0) + 1)
