"""KV caches in 8 bits. A head of a key or a value is stored as 8-bit numbers, followed by a float32 scale for all these
numbers.

The 8-bit numbers are int8 or e4m3. A head of 64 numbers occupies 68 bytes, instead of 128 bytes in a 16-bit cache. The
blocks of an 8-bit cache are copied and moved like the blocks of other caches.
"""

import torch
from torch import Tensor

from kernels.float8 import FLOAT8, LARGEST

SCALE_BYTES = 4
_LARGEST = {torch.int8: 127.0, FLOAT8: LARGEST}
"""The types that an 8-bit cache may have. For each type, the number to which the largest magnitude of a head is
scaled."""


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a cache of this type stores 8-bit values with a scale for each head."""
    return dtype in _LARGEST


def stored_size(head_dim: int, dtype: torch.dtype) -> int:
    """Number of elements that a head occupies in a cache of this type, including its scale."""
    return head_dim + SCALE_BYTES if is_narrow(dtype) else head_dim


def head_dim_of(layer_cache: Tensor) -> int:
    """The head_dim of the heads in a cache. layer_cache is [..., stored elements of a head]."""
    size = layer_cache.shape[-1]
    return size - SCALE_BYTES if is_narrow(layer_cache.dtype) else size


def narrowed(heads: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """Quantise heads, [..., head_dim] in floating point, with a scale for each head. Returns [..., stored elements of a
    head] of type `dtype`.

    The scale maps a head's largest magnitude to the largest number of the type. Scaled numbers are rounded to nearest.
    If an element of a head is not finite, all elements of the head become NaN when it is dequantised. If all magnitudes
    of a head are at most 1e-36, all its elements become 0.
    """
    wide = heads.float()
    largest, most = wide.abs().amax(dim=-1, keepdim=True), _LARGEST[dtype]
    is_finite = largest.isfinite()
    # Both operands of each division are tensors. If an operand were a Python number, torch might multiply by a
    # reciprocal instead, and round twice.
    most_of_all = torch.full_like(largest, most)
    steps = (most_of_all / largest).clamp_(max=torch.finfo(torch.float32).max)
    steps = torch.where(is_finite & (largest > 1e-36), steps, 0)
    numbers = torch.where(is_finite, wide * steps, 0)
    numbers = numbers.round_().to(dtype) if dtype is torch.int8 else numbers.clamp_(-most, most).to(dtype)
    scales = torch.where(is_finite, largest / most_of_all, torch.nan)
    return torch.cat((numbers.view(torch.int8), scales.view(torch.int8)), dim=-1).view(dtype)


def widened(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise heads that `narrowed` has quantised, to [..., head_dim] of type `dtype`."""
    numbers, scales = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:]
    whole = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)  # a view requires aligned bytes
    return (numbers.float() * whole).to(dtype)
