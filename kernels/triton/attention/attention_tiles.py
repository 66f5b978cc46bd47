"""Tile sizes, the sequence of a tile, and online softmax over a tile of keys (Milakov and Gimelshein, 2018; Dao et al.,
2022)."""

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.triton.attention.narrow_cache import scale_place

_INTERPRETED_PROCESSORS = 8
HOPPER_SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory for a program on Hopper."""


def columns_of(head_dim: int) -> int:
    """A power of two, at least 16 for tensor cores."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def tile_keys_of(head_dim: int, dtype: torch.dtype) -> int:
    """Keys and values of a tile take at most 32 KiB of shared memory in a pipeline stage."""
    return max(16, min(64, 2**14 // (columns_of(head_dim) * dtype.itemsize)))


@cache
def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes for a program on this device."""
    if device.type != "cuda":
        return HOPPER_SHARED_MEMORY
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@triton.jit
def sequence_of_tile(tile, query_start, num_sequences, tile_size: tl.constexpr, token_size: tl.constexpr = 1):
    """Find the sequence of a tile. Sequence i begins at tile `query_start[i] * token_size // tile_size + i`. The
    division loses at most one tile for each sequence, and i adds one, so sequences' tiles differ. A tile after the end
    of its sequence computes nothing."""
    low = tl.full([], 0, tl.int32)
    high = num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start + middle) * token_size // tile_size + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def first_key(position, window: tl.constexpr, chunked: tl.constexpr):
    """The first key that the token at `position` attends to."""
    if chunked:
        return position // window * window
    return tl.maximum(position - window + 1, 0)


@triton.jit
def attend_tile(
    queries,
    largest,
    total,
    weighted,
    position,
    last,
    start,
    low,
    high,
    head_cache,
    table,
    head_bias,
    num_distances,
    block_stride,
    part_stride,
    scale,
    masked: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    scale_bytes: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,
    chunked: tl.constexpr,
    soft_cap: tl.constexpr,
    biased: tl.constexpr,
    tile_keys: tl.constexpr,
    head_columns: tl.constexpr,
):
    """Continue online softmax over the keys [start, start + tile_keys), of which [low, high) exist. last: the last
    position that each row attends to. head_bias: address of each row's first bias. On an H200, tiles of 256 x 128 take
    193 KiB of shared memory with a bias and 129 KiB without; its time has not been measured. Returns largest score
    (log2), sum of weights, weighted values."""
    log2_e: tl.constexpr = 1.4426950408889634
    key = start + tl.arange(0, tile_keys)
    column = tl.arange(0, head_columns)
    exists = (key >= low) & (key < high)
    # Neighbouring keys read the same entry of the block table, which is fetched once.
    block = tl.load(table + key // block_size, mask=exists, other=0) if masked else tl.load(table + key // block_size)
    slot = block.to(tl.int64) * block_stride + key % block_size * (num_kv_heads * (head_dim + scale_bytes))
    key_place = head_cache + slot[None, :] + column[:, None]
    value_place = head_cache + part_stride + slot[:, None] + column[None, :]
    # Missing values must be zeros, because 0 times NaN is NaN.
    if masked:
        keys = tl.load(key_place, mask=exists[None, :] & (column < head_dim)[:, None], other=0.0)
        values = tl.load(value_place, mask=exists[:, None] & (column < head_dim)[None, :], other=0.0)
    elif head_dim < head_columns:
        keys = tl.load(key_place, mask=(column < head_dim)[:, None], other=0.0)
        values = tl.load(value_place, mask=(column < head_dim)[None, :], other=0.0)
    else:
        keys = tl.load(key_place)
        values = tl.load(value_place)
    if scale_bytes > 0:
        key_scales = tl.load(scale_place(head_cache + slot + head_dim), mask=exists, other=0.0)
        value_scales = tl.load(scale_place(head_cache + part_stride + slot + head_dim), mask=exists, other=0.0)
        keys = (keys.to(tl.float32) * key_scales[None, :]).to(queries.dtype)
        values = (values.to(tl.float32) * value_scales[:, None]).to(queries.dtype)

    scores = tl.dot(queries, keys, input_precision="ieee")
    if soft_cap > 0:
        # tanh(x) = 2 sigmoid(2x) - 1
        scores = 2.0 * tl.sigmoid(scores * (2.0 * scale / soft_cap)) - 1.0
        factor = soft_cap * log2_e
    elif biased:
        distance = tl.minimum(tl.maximum(position[:, None] - key[None, :], 0), num_distances - 1)
        scores = scores * scale + tl.load(head_bias[:, None] + distance)
        factor = log2_e
    else:
        factor = scale * log2_e
    if masked:
        visible = exists[None, :] & (key[None, :] <= last[:, None])
        if window > 0:
            visible &= key[None, :] >= first_key(position, window, chunked)[:, None]
        scores = tl.where(visible, scores, float("-inf"))

    # The positive `factor` scales the maximum, so that each score needs a single fused instruction.
    new_largest = tl.maximum(largest, tl.max(scores, axis=1) * factor)
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # -inf: no key yet
    weights = tl.exp2(scores * factor - base[:, None])
    shrink = tl.exp2(largest - base)
    total = total * shrink + tl.sum(weights, axis=1)
    weighted = tl.dot(weights.to(values.dtype), values, weighted * shrink[:, None], input_precision="ieee")
    return new_largest, total, weighted
