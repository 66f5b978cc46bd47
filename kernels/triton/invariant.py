"""The batch-invariant backend for GPUs: a row's results have the same bits in any batch.

Products and attention have separate kernels here. All other operations are functions of `kernels.triton`, which are
always batch-invariant: a row is summed up separately, in an order that depends only on its width.
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
