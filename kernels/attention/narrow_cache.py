"""Keys and values in 8 bits: a head is its numbers and, in four bytes behind them, the scale that they share.

The numbers are int8 or e4m3. A head of 64 of them takes 68 bytes in place of 128, and blocks are moved as any others.
"""

import torch
from torch import Tensor

from kernels.float8 import FLOAT8, LARGEST

SCALE_BYTES = 4
_LARGEST = {torch.int8: 127.0, FLOAT8: LARGEST}
"""Types of such a cache, and what the largest number of a head becomes."""


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether heads of a cache of this type have scales."""
    return dtype in _LARGEST


def stored_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements that a head of a cache of this type takes."""
    return head_dim + SCALE_BYTES if is_narrow(dtype) else head_dim


def head_dim_of(layer_cache: Tensor) -> int:
    """Numbers of a head of the cache, [..., elements of a head]."""
    size = layer_cache.shape[-1]
    return size - SCALE_BYTES if is_narrow(layer_cache.dtype) else size


def narrowed(heads: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """[..., head_dim] in floating point as it is stored in this type: the nearest of its numbers, the largest number at
    the largest of these. A head that is not finite is NaN when it is read again, and one whose numbers are all below
    1e-36 is 0."""
    wide = heads.float()
    largest, most = wide.abs().amax(dim=-1, keepdim=True), _LARGEST[dtype]
    is_finite = largest.isfinite()
    # A number divided by a tensor would be its reciprocal times the number, which is rounded twice.
    steps = (torch.full_like(largest, most) / largest).clamp_(max=torch.finfo(torch.float32).max)
    steps = torch.where(is_finite & (largest > 1e-36), steps, 0)
    numbers = torch.where(is_finite, wide * steps, 0)
    numbers = numbers.round_().to(dtype) if dtype is torch.int8 else numbers.clamp_(-most, most).to(dtype)
    scales = torch.where(is_finite, largest / most, torch.nan)
    return torch.cat((numbers.view(torch.int8), scales.view(torch.int8)), dim=-1).view(dtype)


def widened(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """What `narrowed` made, [..., head_dim] in this type."""
    numbers, scales = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:]
    whole = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)  # whose bytes are aligned
    return (numbers.float() * whole).to(dtype)
