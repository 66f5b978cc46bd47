"""The batch-invariant operations of `kernels.triton`: a row's sums are bit-identical whatever else a step computes.

Products and attention have their own kernels. All other operations sum up each row separately anyway, in an order that
its width decides.
"""

from functools import partial
from typing import Any

from kernels import triton
from kernels.triton.attention.attention_by_position import attention_by_position as paged_attention
from kernels.triton.linear.invariant_linear import pack as pack

__all__ = list(triton.__all__)

qkv_attention = partial(triton.qkv_attention, attend=paged_attention)


def __getattr__(name: str) -> Any:
    return getattr(triton, name)
