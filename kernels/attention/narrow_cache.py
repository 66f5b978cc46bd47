"""8-bit KV caches: a head's numbers in int8 or e4m3, then their float32 scale. A head of 64 takes 68 bytes, against 128
in 16 bits. Blocks are copied and moved as in other caches."""

import torch
from torch import Tensor

from kernels.float8 import FLOAT8, LARGEST

SCALE_BYTES = 4
_LARGEST = {torch.int8: 127.0, FLOAT8: LARGEST}
"""Types of an 8-bit cache, with the number for a head's largest magnitude."""


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a cache of this type has 8 bits and scales."""
    return dtype in _LARGEST


def stored_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a head in a cache of this type, including its scale."""
    return head_dim + SCALE_BYTES if is_narrow(dtype) else head_dim


def head_dim_of(layer_cache: Tensor) -> int:
    """layer_cache: [..., stored elements of a head]."""
    size = layer_cache.shape[-1]
    return size - SCALE_BYTES if is_narrow(layer_cache.dtype) else size


def narrowed(heads: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """Quantise heads [..., head_dim], rounding to nearest. Returns [..., stored elements of a head]. If an element is
    not finite, the whole head becomes NaN. If all magnitudes are at most 1e-36, it becomes 0."""
    wide = heads.float()
    largest, most = wide.abs().amax(dim=-1, keepdim=True), _LARGEST[dtype]
    is_finite = largest.isfinite()
    # Both operands are tensors: for a Python number, torch might multiply by a reciprocal, and round twice.
    most_of_all = torch.full_like(largest, most)
    steps = (most_of_all / largest).clamp_(max=torch.finfo(torch.float32).max)
    steps = torch.where(is_finite & (largest > 1e-36), steps, 0)
    numbers = torch.where(is_finite, wide * steps, 0)
    numbers = numbers.round_().to(dtype) if dtype is torch.int8 else numbers.clamp_(-most, most).to(dtype)
    scales = torch.where(is_finite, largest / most_of_all, torch.nan)
    return torch.cat((numbers.view(torch.int8), scales.view(torch.int8)), dim=-1).view(dtype)


def widened(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise to [..., head_dim]."""
    numbers, scales = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:]
    whole = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)  # a view needs aligned bytes
    return (numbers.float() * whole).to(dtype)
