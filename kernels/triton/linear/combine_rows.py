"""Weighted sum of a token's expert outputs, in the order of its experts.

    `rows`      [tokens * chosen, size] of any type, the experts' outputs.
    `places`    [tokens, chosen] int64, the number of the row for each of a token's experts.
    `weights`   [tokens, chosen] float32.
    `result`    [tokens, size] float32.
    `program`   1,024 columns of one token's result.

Oracle: `kernels.linear.experts.combine_rows`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import OPTIONS

_COLUMNS = 1024


def combine_rows(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    size = rows.shape[1]
    result = torch.empty((len(places), size), dtype=torch.float32, device=rows.device)
    if len(places):
        columns = min(_COLUMNS, triton.next_power_of_2(size))
        _combine_rows_kernel[(len(places), triton.cdiv(size, columns))](
            rows, places.contiguous(), weights.contiguous(), result, size,
            chosen=places.shape[1], columns=columns, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return result


@triton.jit
def _combine_rows_kernel(rows, places, weights, result, size, chosen: tl.constexpr, columns: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < size
    total = tl.zeros([columns], tl.float32)
    for number in range(chosen):
        place = tl.load(places + token * chosen + number)
        weight = tl.load(weights + token * chosen + number)
        total += weight * tl.load(rows + place * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + token * size + column, total, mask=inside)
