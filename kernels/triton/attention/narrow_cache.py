"""Stores and reads heads of an 8-bit KV cache in Triton kernels. Oracle: `kernels.attention.narrow_cache`. Scales are
read as float32, so heads have a multiple of 4 elements. A head of 128 takes 132 bytes, so a thread reads 4 bytes at
once; 16 would need another layout. The cost has not been measured."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import narrow_cache


def scale_bytes_of(layer_cache: Tensor) -> int:
    """Bytes of a head's scale, after its numbers; 0 without. Raises ValueError if scales would not be aligned."""
    if not narrow_cache.is_narrow(layer_cache.dtype):
        return 0
    if layer_cache.shape[-1] % narrow_cache.SCALE_BYTES:
        raise ValueError(f"heads of {narrow_cache.head_dim_of(layer_cache)} numbers cannot be kept in 8 bits on a GPU")
    return narrow_cache.SCALE_BYTES


@triton.jit
def magnitudes(heads):
    """Absolute float32 values, NaN as infinity, so that a head with NaN has an infinite maximum."""
    wide = tl.abs(heads.to(tl.float32))
    return tl.where(wide == wide, wide, float("inf"))


@triton.jit
def steps_and_scales(largest, dtype: tl.constexpr):
    """The factor for a head's elements, and the scale to store. largest: maximum of `magnitudes`."""
    most: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    is_finite = largest < float("inf")
    is_usual = is_finite & (largest > 1e-36)
    most_of_all = tl.full(largest.shape, most, tl.float32)
    steps = tl.minimum(tl.div_rn(most_of_all, tl.where(is_usual, largest, 1.0)), 3.4028234663852886e38)
    scales = tl.div_rn(largest, most_of_all)
    return tl.where(is_usual, steps, 0.0), tl.where(is_finite, scales, float("nan"))


@triton.jit
def narrowed(heads, steps, dtype: tl.constexpr):
    """steps: factors of `steps_and_scales`."""
    numbers = tl.where(steps > 0, heads.to(tl.float32) * steps, 0.0)
    if dtype == tl.int8:
        half: tl.constexpr = 12582912.0  # adding it rounds to a whole number, ties to even
        return ((numbers + half) - half).to(tl.int8)
    return tl.clamp(numbers, -448.0, 448.0).to(dtype)


@triton.jit
def scale_place(place):
    """A pointer to float32 from the address of a scale's first byte."""
    return place.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def store_heads(place, column, heads, inside, exists, head_dim: tl.constexpr, scale_bytes: tl.constexpr):
    """Store [heads, columns], and scales in an 8-bit cache. place: [heads, 1], addresses of the first numbers. inside:
    mask of columns. exists: [heads, 1], mask of heads."""
    if scale_bytes > 0:
        steps, scales = steps_and_scales(
            tl.max(tl.where(inside, magnitudes(heads), 0.0), axis=1)[:, None], place.dtype.element_ty
        )
        tl.store(scale_place(place + head_dim), scales, mask=exists)
        tl.store(place + column, narrowed(heads, steps, place.dtype.element_ty), mask=inside)
    else:
        tl.store(place + column, heads, mask=inside)
