"""Keys and values in 8 bits: a head is its numbers and, in four bytes behind them, the scale that they share.

So a head of 64 numbers takes 68 bytes in place of 128, and blocks are moved as any others.
"""

import torch
from torch import Tensor

_SCALE_BYTES = 4


def stored_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements that a head of a cache of this type takes."""
    return head_dim + _SCALE_BYTES * (dtype is torch.int8)


def head_dim_of(layer_cache: Tensor) -> int:
    """Numbers of a head of the cache, [..., elements of a head]."""
    return layer_cache.shape[-1] - _SCALE_BYTES * (layer_cache.dtype is torch.int8)


def narrowed(heads: Tensor) -> Tensor:
    """[..., head_dim] in floating point to int8 as it is stored: the nearest of 255 steps, the largest number at the
    last. A head that is not finite is NaN when it is read again, and one whose numbers are all below 1e-36 is 0."""
    wide = heads.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    is_finite = largest.isfinite()
    # A number divided by a tensor would be its reciprocal times the number, which is rounded twice.
    steps = torch.where(is_finite & (largest > 1e-36), torch.full_like(largest, 127) / largest, 0)
    numbers = torch.where(is_finite, (wide * steps).round_(), 0).to(torch.int8)
    scales = torch.where(is_finite, largest / 127, torch.nan)
    return torch.cat((numbers, scales.view(torch.int8)), dim=-1)


def widened(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """What `narrowed` made, [..., head_dim] in this type."""
    numbers, scales = stored[..., :-_SCALE_BYTES], stored[..., -_SCALE_BYTES:]
    whole = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)  # whose bytes are aligned
    return (numbers.float() * whole).to(dtype)
