"""Keys and values in 8 bits. A head is stored as its numbers, followed by a float32 scale for all its numbers.

The numbers are int8 or e4m3. A head of 64 numbers occupies 68 bytes, instead of 128 bytes in 16 bits. Blocks are moved
like blocks of other types.
"""

import torch
from torch import Tensor

from kernels.float8 import FLOAT8, LARGEST

SCALE_BYTES = 4
_LARGEST = {torch.int8: 127.0, FLOAT8: LARGEST}
"""Types of an 8-bit cache. Value: the number to which a head's largest magnitude is scaled."""


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a cache of this type stores a scale for each head."""
    return dtype in _LARGEST


def stored_size(head_dim: int, dtype: torch.dtype) -> int:
    """Number of elements that a head occupies in a cache of this type."""
    return head_dim + SCALE_BYTES if is_narrow(dtype) else head_dim


def head_dim_of(layer_cache: Tensor) -> int:
    """The head_dim of a cache. layer_cache: [..., elements of a head]."""
    size = layer_cache.shape[-1]
    return size - SCALE_BYTES if is_narrow(layer_cache.dtype) else size


def narrowed(heads: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """Quantise heads, [..., head_dim] in floating point, with a scale for each head. Returns [..., elements of a head]
    of type `dtype`.

    The scale maps a head's largest magnitude to the type's largest number. Numbers are then rounded to nearest. If a
    number of a head is not finite, the dequantised head is NaN. A head with all magnitudes at most 1e-36 becomes 0.
    """
    wide = heads.float()
    largest, most = wide.abs().amax(dim=-1, keepdim=True), _LARGEST[dtype]
    is_finite = largest.isfinite()
    # Both operands of the division are tensors. If an operand of a division is a Python number, torch may multiply by a
    # reciprocal instead, and round twice.
    most_of_all = torch.full_like(largest, most)
    steps = (most_of_all / largest).clamp_(max=torch.finfo(torch.float32).max)
    steps = torch.where(is_finite & (largest > 1e-36), steps, 0)
    numbers = torch.where(is_finite, wide * steps, 0)
    numbers = numbers.round_().to(dtype) if dtype is torch.int8 else numbers.clamp_(-most, most).to(dtype)
    scales = torch.where(is_finite, largest / most_of_all, torch.nan)
    return torch.cat((numbers.view(torch.int8), scales.view(torch.int8)), dim=-1).view(dtype)


def widened(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise the result of `narrowed` to [..., head_dim] of type `dtype`."""
    numbers, scales = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:]
    whole = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)  # a view requires aligned bytes
    return (numbers.float() * whole).to(dtype)
