"""Attention from a fused QKV projection: one kernel normalises, rotates and stores before the attention kernel.

    `qkv`          [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], query, key and value heads in this order.
    `cos, sin`     [num_tokens, half] float32, contiguous. Only the first 2 * half elements of a head are rotated.
    `layer_cache`  [num_blocks, 2, block_size, num_kv_heads, head_dim], a strided view of one layer. May be in 8 bits.
    `tile`         A program has two tiles of one token, [heads, half padded to a power of two], and one with the rest.

Queries go to `qkv`, keys and values to the cache. A decode step of 32 layers launches 32 kernels in place of 96, and
reads no intermediate result from memory. Oracle: `kernels.composed.qkv_attention`.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.narrow_cache import head_dim_of
from kernels.inputs import AttentionMetadata
from kernels.triton.attention.narrow_cache import magnitudes, narrowed, scale_bytes_of, scale_place, steps_and_scales
from kernels.triton.attention.paged_attention import paged_attention
from kernels.triton.launch import OPTIONS, num_warps

_TILE = 1024
"""Elements of a tile, half of each head: 16 heads of 128."""


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
    sinks: Tensor | None = None,
    chunked: bool = False,
    attend: Callable[..., Tensor] = paged_attention,
) -> Tensor:
    """Tokens with a negative slot are not stored. attend: computes the attention."""
    query = _prepare(qkv, norms, eps, offset, rotation, layer_cache, slots)
    return attend(query, layer_cache, metadata, scale, window, soft_cap, sinks=sinks, chunked=chunked).flatten(1)


def _prepare(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    offset: float,
    rotation: tuple[Tensor, Tensor] | None,
    layer_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """Returns query heads [num_tokens, num_heads, head_dim], a view of `qkv`."""
    num_tokens = len(qkv)
    block_size, num_kv_heads, head_dim = *layer_cache.shape[2:4], head_dim_of(layer_cache)
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    half = head_dim // 2 if rotation is None else rotation[0].shape[1]
    rest = head_dim - 2 * half
    columns = triton.next_power_of_2(half)
    all_heads = num_heads + 2 * num_kv_heads
    heads = min(triton.next_power_of_2(all_heads), max(1, _TILE // columns))
    if num_tokens:
        _prepare_qkv_kernel[(num_tokens, triton.cdiv(all_heads, heads))](
            qkv,
            *(norms or (qkv, qkv)),  # unread without norms
            *(rotation or (qkv, qkv)),
            layer_cache,
            slots,
            qkv.stride(0),
            layer_cache.stride(0),
            layer_cache.stride(1),
            eps,
            offset,
            normalises=norms is not None,
            rotates=rotation is not None,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale_bytes=scale_bytes_of(layer_cache),
            block_size=block_size,
            half=half,
            rest=rest,
            heads=heads,
            columns=columns,
            rest_columns=triton.next_power_of_2(max(rest, 1)),
            num_warps=num_warps(2 * heads * columns),
            **OPTIONS,
        )
    return qkv.view(num_tokens, all_heads, head_dim)[:, :num_heads]


@triton.jit
def _prepare_qkv_kernel(
    qkv,
    query_norm,
    key_norm,
    cos,
    sin,
    layer_cache,
    slots,
    token_stride,
    block_stride,
    part_stride,
    eps,
    offset,
    normalises: tl.constexpr,
    rotates: tl.constexpr,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    scale_bytes: tl.constexpr,
    block_size: tl.constexpr,
    half: tl.constexpr,
    rest: tl.constexpr,
    heads: tl.constexpr,
    columns: tl.constexpr,
    rest_columns: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)[:, None]
    is_query = head < num_heads
    is_value = head >= num_heads + num_kv_heads
    exists = head < num_heads + 2 * num_kv_heads
    column = tl.arange(0, columns)[None, :]
    inside = exists & (column < half)
    source = qkv + token * token_stride + head * head_dim
    first = tl.load(source + column, mask=inside, other=0.0)
    second = tl.load(source + half + column, mask=inside, other=0.0)
    rest_column = tl.arange(0, rest_columns)[None, :]
    inside_rest = exists & (rest_column < rest)
    remainder = first  # Triton needs a value even without a rest
    if rest > 0:
        remainder = tl.load(source + 2 * half + rest_column, mask=inside_rest, other=0.0)

    turned_first, turned_second = first, second
    if normalises:
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(wide_first * wide_first, axis=1) + tl.sum(wide_second * wide_second, axis=1)
        if rest > 0:
            wide_rest = remainder.to(tl.float32)
            squares += tl.sum(wide_rest * wide_rest, axis=1)
        scale = tl.rsqrt(squares / head_dim + eps)[:, None]
        turned_first = _normalised(first, scale, query_norm, key_norm, is_query, is_value, column, half, offset)
        turned_second = _normalised(
            second, scale, query_norm + half, key_norm + half, is_query, is_value, column, half, offset
        )
        if rest > 0:
            remainder = _normalised(
                remainder, scale, query_norm + 2 * half, key_norm + 2 * half, is_query, is_value, rest_column, rest,
                offset,
            ).to(first.dtype)  # fmt: skip
    if rotates:
        cosine = tl.load(cos + token * half + column, mask=column < half, other=0.0)
        sine = tl.load(sin + token * half + column, mask=column < half, other=0.0)
        wide_first, wide_second = turned_first.to(tl.float32), turned_second.to(tl.float32)
        turned_first = wide_first * cosine - wide_second * sine
        turned_second = wide_second * cosine + wide_first * sine
    first = tl.where(is_value, first, turned_first.to(first.dtype))
    second = tl.where(is_value, second, turned_second.to(first.dtype))

    tl.store(source + column, first, mask=inside & is_query)
    tl.store(source + half + column, second, mask=inside & is_query)
    if rest > 0:
        tl.store(source + 2 * half + rest_column, remainder, mask=inside_rest & is_query)
    slot = tl.load(slots + token)
    if slot >= 0:
        place = layer_cache + slot // block_size * block_stride
        place += (slot % block_size * num_kv_heads + (head - num_heads) % num_kv_heads) * (head_dim + scale_bytes)
        place += tl.where(is_value, part_stride, 0)
        is_stored = head >= num_heads
        kept_first, kept_second, kept_rest = first, second, remainder
        if scale_bytes > 0:
            dtype: tl.constexpr = layer_cache.dtype.element_ty
            # No mask: elements outside a head were loaded as 0, and so were their norm weights.
            largest = tl.maximum(tl.max(magnitudes(first), axis=1), tl.max(magnitudes(second), axis=1))
            if rest > 0:
                largest = tl.maximum(largest, tl.max(magnitudes(remainder), axis=1))
            steps, scales = steps_and_scales(largest[:, None], dtype)
            tl.store(scale_place(place + head_dim), scales, mask=exists & is_stored)
            kept_first, kept_second = narrowed(first, steps, dtype), narrowed(second, steps, dtype)
            if rest > 0:
                kept_rest = narrowed(remainder, steps, dtype)
        tl.store(place + column, kept_first, mask=inside & is_stored)
        tl.store(place + half + column, kept_second, mask=inside & is_stored)
        if rest > 0:
            tl.store(place + 2 * half + rest_column, kept_rest, mask=inside_rest & is_stored)


@triton.jit
def _normalised(values, scale, query_norm, key_norm, is_query, is_value, column, width: tl.constexpr, offset):
    """Multiply query and key heads, not values, by norm weights and inverse root mean square `scale`. Returns
    float32."""
    inside = column < width
    query_factors = tl.load(query_norm + column, mask=inside, other=0.0).to(tl.float32)
    key_factors = tl.load(key_norm + column, mask=inside, other=0.0).to(tl.float32)
    factors = tl.where(is_query, query_factors, key_factors) + offset
    wide = values.to(tl.float32)
    return tl.where(is_value, wide, wide * scale * factors)
