"""Picks each row's largest candidate, the first among equals, as the last pass of `greedy` and `draw`. `values, ids`
[rows, parts] float32, no NaN, and [rows, parts] int32, sorted by id. `program` One row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import OPTIONS, num_warps


def pick(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ids [rows] int64 and values [rows] float32."""
    rows, parts = values.shape
    token_ids = torch.empty(rows, dtype=torch.int64, device=values.device)
    largest = torch.empty(rows, device=values.device)
    if rows:
        columns = triton.next_power_of_2(parts)
        _pick_kernel[(rows,)](
            values, ids, token_ids, largest, parts, columns=columns, num_warps=num_warps(columns), **OPTIONS
        )
    return token_ids, largest


@triton.jit
def _pick_kernel(values, ids, token_ids, largest, parts, columns: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, columns)
    value = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
    best = tl.max(value, axis=0)
    first = tl.min(tl.where(value == best, part, columns - 1), axis=0)
    tl.store(token_ids + row, tl.load(ids + row * parts + tl.minimum(first, parts - 1)).to(tl.int64))
    tl.store(largest + row, best)
