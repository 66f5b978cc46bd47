"""The batch-invariant backend for GPUs, with which the results of a row have the same bits in any batch.

This backend has its own kernels for products and attention. All other operations are the functions of `kernels.triton`,
which are always batch-invariant, because these functions sum each row separately, in an order that depends only on the
row's width.
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
