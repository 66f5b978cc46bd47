"""The operations of `kernels.triton` with sums of a row that are the same to the bit whatever else a step computes.

Products and attention are others; all the rest sums up each row alone already, in an order that its width decides.
"""

from typing import Any

from torch import Tensor

from kernels import triton
from kernels.metadata import AttentionMetadata
from kernels.triton.attention_by_position import attention_by_position as paged_attention
from kernels.triton.invariant_linear import pack as pack
from kernels.triton.qkv_attention import prepared_query

__all__ = list(triton.__all__)


def qkv_attention(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    offset: float,
    rotation: tuple[Tensor, Tensor] | None,
    layer_cache: Tensor,
    slots: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """As `kernels.triton.qkv_attention`."""
    query = prepared_query(qkv, norms, eps, offset, rotation, layer_cache, slots)
    return paged_attention(query, layer_cache, metadata, scale, window, soft_cap).flatten(1)


def __getattr__(name: str) -> Any:
    return getattr(triton, name)
