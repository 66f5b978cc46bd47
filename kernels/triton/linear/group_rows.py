"""Groups the rows of a mixture by expert: a stable counting sort.

    `experts`   [tokens, chosen] int64, distinct for a token.
    `result`    See `kernels.ops.ExpertRows`.
    `program`   One expert. It reads the experts of all rows twice, 1,024 at a time: to count the rows of earlier
                experts, then to number its own.

Oracle: `kernels.linear.experts.group_rows`, which also groups many rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear import experts as eager
from kernels.ops import ExpertRows
from kernels.triton.launch import OPTIONS, num_warps

_MAX_ROWS = 16_384
"""Rows up to which this kernel is used; torch sorts more."""
_WIDTH = 1024


def group_rows(experts: Tensor, num_experts: int) -> ExpertRows:
    num_rows = experts.numel()
    if num_rows > _MAX_ROWS:
        return eager.group_rows(experts, num_experts)
    tokens, places, ends = (
        torch.empty(shape, dtype=torch.int64, device=experts.device) for shape in (num_rows, experts.shape, num_experts)
    )
    width = min(_WIDTH, triton.next_power_of_2(max(1, num_rows)))
    _group_rows_kernel[(num_experts,)](
        experts.contiguous(), tokens, places, ends, num_rows, experts.shape[1],
        width=width, num_warps=num_warps(width), **OPTIONS,
    )  # fmt: skip
    return ExpertRows(tokens, places, ends)


@triton.jit(do_not_specialize=["num_rows"])
def _group_rows_kernel(experts, tokens, places, ends, num_rows, chosen, width: tl.constexpr):
    mine = tl.program_id(0)
    earlier = tl.zeros([width], tl.int32)
    own = tl.zeros([width], tl.int32)
    for start in range(0, num_rows, width):
        row = start + tl.arange(0, width)
        expert = tl.load(experts + row, mask=row < num_rows, other=0x7FFFFFFF)
        earlier += (expert < mine).to(tl.int32)
        own += (expert == mine).to(tl.int32)
    place = tl.sum(earlier, axis=0)
    tl.store(ends + mine, (place + tl.sum(own, axis=0)).to(tl.int64))
    for start in range(0, num_rows, width):
        row = start + tl.arange(0, width)
        is_own = tl.load(experts + row, mask=row < num_rows, other=0x7FFFFFFF) == mine
        behind = place + tl.cumsum(is_own.to(tl.int32), axis=0)
        tl.store(tokens + behind - 1, (row // chosen).to(tl.int64), mask=is_own)
        tl.store(places + row, (behind - 1).to(tl.int64), mask=is_own)
        place += tl.sum(is_own.to(tl.int32), axis=0)
