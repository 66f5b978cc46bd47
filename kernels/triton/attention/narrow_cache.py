"""Functions with which Triton kernels store and read the heads of an 8-bit KV cache. The oracle is
`kernels.attention.narrow_cache`.

The scale of a head is read as one float32, so the number of elements of a head must be a multiple of 4. A head of 128
numbers occupies 132 bytes with its scale, so a thread can read only 4 bytes of a head at once. Reads of 16 bytes would
require another layout of the cache. How much time the small reads cost has not been measured.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import narrow_cache


def scale_bytes_of(layer_cache: Tensor) -> int:
    """Number of bytes of a head's scale, which is stored after the head's numbers; 0 for a cache without scales. Raises
    ValueError if the scales in this cache would not be aligned."""
    if not narrow_cache.is_narrow(layer_cache.dtype):
        return 0
    if layer_cache.shape[-1] % narrow_cache.SCALE_BYTES:
        raise ValueError(f"heads of {narrow_cache.head_dim_of(layer_cache)} numbers cannot be kept in 8 bits on a GPU")
    return narrow_cache.SCALE_BYTES


@triton.jit
def magnitudes(heads):
    """The absolute values of heads' elements, in float32. NaN becomes infinity, so that the maximum over a head with
    NaN is infinite."""
    wide = tl.abs(heads.to(tl.float32))
    return tl.where(wide == wide, wide, float("inf"))


@triton.jit
def steps_and_scales(largest, dtype: tl.constexpr):
    """For each head, compute the factor by which its elements are multiplied, and the scale that is stored. largest:
    the maximum of the head's `magnitudes`."""
    most: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    is_finite = largest < float("inf")
    is_usual = is_finite & (largest > 1e-36)
    most_of_all = tl.full(largest.shape, most, tl.float32)
    steps = tl.minimum(tl.div_rn(most_of_all, tl.where(is_usual, largest, 1.0)), 3.4028234663852886e38)
    scales = tl.div_rn(largest, most_of_all)
    return tl.where(is_usual, steps, 0.0), tl.where(is_finite, scales, float("nan"))


@triton.jit
def narrowed(heads, steps, dtype: tl.constexpr):
    """Quantise the elements of heads. steps: the heads' factors, from `steps_and_scales`."""
    numbers = tl.where(steps > 0, heads.to(tl.float32) * steps, 0.0)
    if dtype == tl.int8:
        half: tl.constexpr = 12582912.0  # adding it rounds to a whole number, ties to even
        return ((numbers + half) - half).to(tl.int8)
    return tl.clamp(numbers, -448.0, 448.0).to(dtype)


@triton.jit
def scale_place(place):
    """Convert the address of the first byte of a scale to a pointer to float32."""
    return place.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def store_heads(place, column, heads, inside, exists, head_dim: tl.constexpr, scale_bytes: tl.constexpr):
    """Store heads, [heads, columns], and in an 8-bit cache also their scales. place is [heads, 1], the address of each
    head's first number. inside: the mask of columns that are within a head. exists is [heads, 1], the mask of heads
    that exist."""
    if scale_bytes > 0:
        steps, scales = steps_and_scales(
            tl.max(tl.where(inside, magnitudes(heads), 0.0), axis=1)[:, None], place.dtype.element_ty
        )
        tl.store(scale_place(place + head_dim), scales, mask=exists)
        tl.store(place + column, narrowed(heads, steps, place.dtype.element_ty), mask=inside)
    else:
        tl.store(place + column, heads, mask=inside)
