"""The batch-invariant backend for GPUs: other attention and other products, also of experts. The rest of
`kernels.triton` is always batch-invariant: each row is summed by itself, in an order of its width."""

from functools import partial
from typing import Any

from kernels import triton
from kernels.triton.attention.attention_by_position import attention_by_position as paged_attention
from kernels.triton.linear.grouped_linear import invariant_grouped_linear
from kernels.triton.linear.invariant_linear import pack as pack

__all__ = list(triton.__all__)

grouped_linear = invariant_grouped_linear
qkv_attention = partial(triton.qkv_attention, attend=paged_attention)


def __getattr__(name: str) -> Any:
    return getattr(triton, name)
