"""Heads in 8 bits, as kernels store and read them. Oracle: `kernels.attention.narrow_cache`.

A scale is read as one float32, so heads must have a multiple of 4 numbers. With heads 132 bytes apart, a thread reads 4
bytes at once; reads of 16 bytes would need another layout. The cost has not been measured.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import narrow_cache


def scale_bytes_of(layer_cache: Tensor) -> int:
    """Bytes after the numbers of a head: 0 for a cache without scales. Raises ValueError if scales would not be
    aligned."""
    if not narrow_cache.is_narrow(layer_cache.dtype):
        return 0
    if layer_cache.shape[-1] % narrow_cache.SCALE_BYTES:
        raise ValueError(f"heads of {narrow_cache.head_dim_of(layer_cache)} numbers cannot be kept in 8 bits on a GPU")
    return narrow_cache.SCALE_BYTES


@triton.jit
def magnitudes(heads):
    """Absolute values in float32, infinite in place of NaN, so that a maximum shows NaN."""
    wide = tl.abs(heads.to(tl.float32))
    return tl.where(wide == wide, wide, float("inf"))


@triton.jit
def steps_and_scales(largest, dtype: tl.constexpr):
    """largest: the largest of `magnitudes` of each head. Returns the factor for its numbers, and the scale to store."""
    most: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    is_finite = largest < float("inf")
    is_usual = is_finite & (largest > 1e-36)
    most_of_all = tl.full(largest.shape, most, tl.float32)
    steps = tl.minimum(tl.div_rn(most_of_all, tl.where(is_usual, largest, 1.0)), 3.4028234663852886e38)
    scales = tl.div_rn(largest, most_of_all)
    return tl.where(is_usual, steps, 0.0), tl.where(is_finite, scales, float("nan"))


@triton.jit
def narrowed(heads, steps, dtype: tl.constexpr):
    """The numbers to store."""
    numbers = tl.where(steps > 0, heads.to(tl.float32) * steps, 0.0)
    if dtype == tl.int8:
        half: tl.constexpr = 12582912.0  # float32 numbers of this size are whole, so adding it rounds to even
        return ((numbers + half) - half).to(tl.int8)
    return tl.clamp(numbers, -448.0, 448.0).to(dtype)


@triton.jit
def scale_place(place):
    """The address of a scale, from the address of its first byte."""
    return place.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def store_heads(place, column, heads, inside, exists, head_dim: tl.constexpr, scale_bytes: tl.constexpr):
    """Store heads, [heads, columns], with their scales. place: [heads, 1], of their first numbers; inside: mask of
    columns within a head; exists: mask of heads, [heads, 1]."""
    if scale_bytes > 0:
        steps, scales = steps_and_scales(
            tl.max(tl.where(inside, magnitudes(heads), 0.0), axis=1)[:, None], place.dtype.element_ty
        )
        tl.store(scale_place(place + head_dim), scales, mask=exists)
        tl.store(place + column, narrowed(heads, steps, place.dtype.element_ty), mask=inside)
    else:
        tl.store(place + column, heads, mask=inside)
