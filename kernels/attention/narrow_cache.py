"""Keys and values in 8 bits: a head is its numbers, followed by four bytes with their common scale.

The numbers are int8 or e4m3. A head of 64 numbers takes 68 bytes instead of 128. Blocks are moved like any others.
"""

import torch
from torch import Tensor

from kernels.float8 import FLOAT8, LARGEST

SCALE_BYTES = 4
_LARGEST = {torch.int8: 127.0, FLOAT8: LARGEST}
"""Types of an 8-bit cache, and the number that a head's largest magnitude is scaled to."""


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether heads of a cache of this type have scales."""
    return dtype in _LARGEST


def stored_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements that a head of a cache of this type takes."""
    return head_dim + SCALE_BYTES if is_narrow(dtype) else head_dim


def head_dim_of(layer_cache: Tensor) -> int:
    """Numbers in a head of the cache, [..., elements of a head]."""
    size = layer_cache.shape[-1]
    return size - SCALE_BYTES if is_narrow(layer_cache.dtype) else size


def narrowed(heads: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """Quantise [..., head_dim] in floating point to this type, with a scale for each head.

    Numbers are rounded to nearest, with the largest magnitude at the type's largest number. A head that is not finite
    is NaN when read again. A head whose numbers are all below 1e-36 becomes 0.
    """
    wide = heads.float()
    largest, most = wide.abs().amax(dim=-1, keepdim=True), _LARGEST[dtype]
    is_finite = largest.isfinite()
    # torch divides a Python number by a tensor, and a GPU a tensor by a number, as products with a reciprocal, which
    # are rounded twice.
    most_of_all = torch.full_like(largest, most)
    steps = (most_of_all / largest).clamp_(max=torch.finfo(torch.float32).max)
    steps = torch.where(is_finite & (largest > 1e-36), steps, 0)
    numbers = torch.where(is_finite, wide * steps, 0)
    numbers = numbers.round_().to(dtype) if dtype is torch.int8 else numbers.clamp_(-most, most).to(dtype)
    scales = torch.where(is_finite, largest / most_of_all, torch.nan)
    return torch.cat((numbers.view(torch.int8), scales.view(torch.int8)), dim=-1).view(dtype)


def widened(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise the result of `narrowed` to [..., head_dim] of this type."""
    numbers, scales = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:]
    whole = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned bytes
    return (numbers.float() * whole).to(dtype)
