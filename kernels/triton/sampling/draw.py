"""Draws a token for each entry of `draws`: temperature, filters and Gumbel noise in one pass over the logits.

    `logits`    [rows, vocabulary_size], of any float type, with any stride between rows.
    `program`   4,096 columns of the row of one draw.
    `partial`   Input of `pick`: each program's largest `(logit - largest) / temperature + gumbel`, and its column.

`filter_thresholds` computes thresholds first. Oracle: `kernels.sampling.eager.draw`, with the same random bits, but
logarithms may differ in the last bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.eager import Draws
from kernels.triton.launch import OPTIONS, num_warps
from kernels.triton.sampling.filter_thresholds import filter_thresholds
from kernels.triton.sampling.noise import gumbel_noise
from kernels.triton.sampling.pick import pick

_COLUMNS = 4096


def draw(logits: Tensor, largest: Tensor, draws: Draws) -> Tensor:
    num_draws, vocabulary_size = len(draws.rows), logits.shape[1]
    columns = min(_COLUMNS, triton.next_power_of_2(vocabulary_size))
    parts = triton.cdiv(vocabulary_size, columns)
    values = torch.empty((num_draws, parts), device=logits.device)
    ids = torch.empty((num_draws, parts), dtype=torch.int32, device=logits.device)
    if num_draws:
        _draw_kernel[(num_draws, parts)](
            logits,
            largest,
            draws.rows,
            draws.keys,
            draws.temperature,
            filter_thresholds(logits, largest, draws),
            values,
            ids,
            vocabulary_size,
            logits.stride(0),
            columns=columns,
            num_warps=num_warps(columns),
            **OPTIONS,
        )
    return pick(values, ids)[0]


@triton.jit
def _draw_kernel(
    logits,
    largest,
    rows,
    keys,
    temperatures,
    thresholds,
    values,
    ids,
    vocabulary_size,
    row_stride,
    columns: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tl.load(rows + number)
    column = part * columns + tl.arange(0, columns)
    logit = tl.load(logits + row * row_stride + column, mask=column < vocabulary_size, other=float("-inf"))
    below = logit.to(tl.float32) - tl.load(largest + row).to(tl.float32)
    scaled = tl.div_rn(below, tl.load(temperatures + number) + tl.zeros([columns], tl.float32))
    score = scaled + gumbel_noise(tl.load(keys + number), column)
    score = tl.where((scaled >= tl.load(thresholds + number)) & (column < vocabulary_size), score, float("-inf"))
    best = tl.max(score, axis=0)
    place = number * tl.num_programs(1) + part
    tl.store(values + place, best)
    tl.store(ids + place, tl.min(tl.where(score == best, column, part * columns + columns - 1), axis=0))
