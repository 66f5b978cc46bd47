"""Merges the results of programs that share a query row's keys: `sum(2^(s - max s) * o) / sum(2^(s - max s))`.

    `partial`    [num_tokens, num_heads, splits, head_dim] float32: o, the attention over the keys of each split.
    `log_sums`   [num_tokens, num_heads, splits] float32: s, log2 of a split's sum of weights; -inf without keys.
    `output`     [num_tokens, num_heads, head_dim].
    `program`    One head of one token.

Rows without keys are zero. This is the second half of flash-decoding (Dao et al., 2023).
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import OPTIONS, num_warps


def merge_splits(partial: Tensor, log_sums: Tensor, output: Tensor) -> None:
    """The number of splits must be a power of two."""
    num_tokens, num_heads, splits, head_dim = partial.shape
    columns = triton.next_power_of_2(head_dim)
    _merge_splits_kernel[(num_tokens, num_heads)](
        partial,
        log_sums,
        output,
        num_heads,
        splits=splits,
        head_dim=head_dim,
        columns=columns,
        num_warps=num_warps(splits * columns),
        **OPTIONS,
    )


@triton.jit
def _merge_splits_kernel(
    partial, log_sums, output, num_heads, splits: tl.constexpr, head_dim: tl.constexpr, columns: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    split = tl.arange(0, splits)
    column = tl.arange(0, columns)
    log_sum = tl.load(log_sums + row * splits + split)
    largest = tl.max(log_sum, axis=0)
    weights = tl.exp2(log_sum - tl.where(largest == float("-inf"), 0.0, largest))
    place = partial + (row * splits + split[:, None]) * head_dim + column[None, :]
    parts = tl.load(place, mask=(column < head_dim)[None, :], other=0.0)
    total = tl.sum(weights, axis=0)
    result = tl.sum(parts * weights[:, None], axis=0) / tl.where(total == 0, 1.0, total)
    tl.store(output + row * head_dim + column, result.to(output.dtype.element_ty), mask=column < head_dim)
