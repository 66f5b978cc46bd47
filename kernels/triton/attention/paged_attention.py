"""Paged attention, `softmax(q kᵀ * scale) v`, over blocks that are read in place, for chunks and decodes in one call.

    `query`         [num_tokens, num_heads, head_dim], with any stride between tokens.
    `layer_cache`   [num_blocks, 2, block_size, num_kv_heads, head_dim], a strided view of one layer. May be in 8 bits.
    `program`       One tile of a sequence's query rows for one key head, over one part of the keys.

A tile has the query heads of one key head for several tokens, which use the same loaded keys. Softmax is online over
tiles of keys (Milakov and Gimelshein, 2018; Dao et al., 2022). If tiles are too few for the device, programs share a
tile's keys, and `merge_splits` merges (Dao et al., 2023).

There is a launch for decodes (tiles of one token) and one for chunks. Grids depend on shapes and the metadata's maxima
only, so that a CUDA graph of decodes is valid for all contexts up to its maximum. A graph's padding row is a sequence
with a context of 0, and its result is zero. `attention_by_position` computes decodes with shared parts, and
`latent_attention` a cache without values. Oracle: `kernels.reference.paged_attention`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.options import check_attention_options, check_no_options
from kernels.inputs import AttentionMetadata
from kernels.triton.attention.attention_by_position import attention_by_position
from kernels.triton.attention.attention_tiles import (
    HOPPER_SHARED_MEMORY,
    attend_tile,
    columns_of,
    first_key,
    num_processors,
    sequence_of_tile,
    shared_memory,
    tile_keys_of,
)
from kernels.triton.attention.latent_attention import latent_attention
from kernels.triton.attention.merge_parts import begun
from kernels.triton.attention.merge_splits import merge_splits
from kernels.triton.attention.narrow_cache import scale_bytes_of
from kernels.triton.launch import OPTIONS

_MAX_SPLITS = 64


def paged_attention(
    query: Tensor,
    layer_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """Every row of `query` must belong to a sequence."""
    ends = metadata.visible_ends
    if layer_cache.shape[1] == 1:
        check_no_options(window, soft_cap, bias, sinks, ends, causal=causal)
        return latent_attention(query, layer_cache, metadata, scale, by_position=False)
    if metadata.shared is not None and window is None and bias is None and causal:
        return attention_by_position(query, layer_cache, metadata, scale, soft_cap=soft_cap, sinks=sinks)
    check_attention_options(query, window, soft_cap, bias, causal, sinks, chunked, ends)
    num_tokens, num_heads, head_dim = query.shape
    num_sequences, num_kv_heads = len(metadata.context_lens), layer_cache.shape[3]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return output
    groups = num_heads // num_kv_heads
    head_columns = columns_of(head_dim)
    chunk = _chunk_tile(metadata.max_query_len, groups, head_columns, query.dtype, query.device)
    decode = _decode_tile(groups, head_columns)
    only_decodes = metadata.max_query_len == 1
    num_tiles = num_sequences if only_decodes else num_tokens // (chunk.rows // groups) + num_sequences
    tile_keys = tile_keys_of(head_dim, query.dtype)
    visible = metadata.max_context_len if window is None else min(metadata.max_context_len, window + tile_keys)
    num_splits = _num_splits(num_tiles * num_kv_heads, triton.cdiv(visible, tile_keys), query.device)
    if num_splits == 1:
        partial, log_sums = output, output  # unused without splits
    else:
        partial = torch.empty((num_tokens, num_heads, num_splits, head_dim), device=query.device)
        log_sums = torch.empty((num_tokens, num_heads, num_splits), device=query.device)

    def launch(decodes: bool, num_tiles: int, tile: _Tile) -> None:
        _paged_attention_kernel[(num_tiles * num_kv_heads, num_splits)](
            query,
            layer_cache,
            partial,
            log_sums,
            metadata.query_start,
            metadata.context_lens,
            metadata.block_tables,
            query if bias is None else bias,  # unread without a bias
            query if sinks is None else sinks,
            metadata.query_start if ends is None else ends,  # unread without ends
            num_sequences,
            num_splits,
            0 if bias is None else bias.shape[1],
            query.stride(0),
            layer_cache.stride(0),
            layer_cache.stride(1),
            metadata.block_tables.stride(0),
            scale,
            decodes=decodes,
            split=num_splits > 1,
            groups=groups,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale_bytes=scale_bytes_of(layer_cache),
            block_size=layer_cache.shape[2],
            window=window or 0,
            chunked=chunked,
            soft_cap=soft_cap or 0.0,
            biased=bias is not None,
            has_sinks=sinks is not None,
            has_ends=ends is not None,
            causal=causal,
            tile_rows=tile.rows,
            tile_keys=tile_keys,
            head_columns=head_columns,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **OPTIONS,
        )

    if not only_decodes:
        launch(decodes=False, num_tiles=num_tiles, tile=chunk)
    if only_decodes or num_tokens < num_sequences * metadata.max_query_len:
        launch(decodes=True, num_tiles=num_sequences, tile=decode)
    if num_splits > 1:
        merge_splits(partial, log_sums, output)
    return output


class _Tile(NamedTuple):
    """A tile's shape, and compile options."""

    rows: int
    num_warps: int
    num_stages: int
    """Pipeline stages. Entries of the block table are loaded in separate stages, before their keys."""


def _decode_tile(groups: int, head_columns: int) -> _Tile:
    """Few warps, so that several programs fit on a multiprocessor and compute while others wait for keys."""
    rows = max(16, triton.next_power_of_2(groups))
    num_warps = 2 if rows == 16 else 4 if rows * head_columns < 2**13 else 8
    return _Tile(rows, num_warps, 5)


def _chunk_tile(max_query_len: int, groups: int, head_columns: int, dtype: torch.dtype, device: torch.device) -> _Tile:
    """One of few sizes, because the kernel is compiled for each. H200, heads of 128: 256 rows reach 56 % of the rate of
    large matrix products, 128 rows 51 %; with more, ptxas spills the accumulator. float32 needs the most registers,
    because no tensor core multiplies float32 exactly."""
    most = 2**15 if shared_memory(device) >= HOPPER_SHARED_MEMORY else 2**14
    largest = max(16, min(most // 128, most // head_columns // (16 if dtype is torch.float32 else 1)))
    fitting = next((size for size in (16, 64, 128) if largest >= size >= max_query_len * groups), largest)
    rows = max(fitting, triton.next_power_of_2(groups))
    return _Tile(rows, 8 if rows * head_columns >= 2**15 else 4, 3)


def _num_splits(num_programs: int, num_key_tiles: int, device: torch.device) -> int:
    """Programs for one tile, a power of two; at most two programs for each multiprocessor."""
    most = min(2 * num_processors(device) // num_programs, num_key_tiles, _MAX_SPLITS)
    return 1 << max(most, 1).bit_length() - 1


@triton.jit(do_not_specialize=["num_sequences", "num_splits", "num_distances", "table_stride"])
def _paged_attention_kernel(
    query,
    layer_cache,
    output,
    log_sums,
    query_start,
    context_lens,
    block_tables,
    bias,
    sinks,
    visible_ends,
    num_sequences,
    num_splits,
    num_distances,
    query_stride,
    block_stride,
    part_stride,
    table_stride,
    scale,
    decodes: tl.constexpr,
    split: tl.constexpr,
    groups: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    scale_bytes: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,
    chunked: tl.constexpr,
    soft_cap: tl.constexpr,
    biased: tl.constexpr,
    has_sinks: tl.constexpr,
    has_ends: tl.constexpr,
    causal: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    head_columns: tl.constexpr,
):
    """output: [num_tokens, num_heads, head_dim], or with splits [num_tokens, num_heads, num_splits, head_dim]
    float32."""
    tile_tokens: tl.constexpr = tile_rows // groups
    # Neighbouring key heads get neighbouring programs, because a token's heads are neighbours in memory.
    kv_head = tl.program_id(0) % num_kv_heads
    part = tl.program_id(1)
    if decodes:
        sequence = tl.program_id(0) // num_kv_heads
        first_token = 0
    else:
        # Last tiles first, because they have the most keys.
        tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // num_kv_heads
        sequence = sequence_of_tile(tile, query_start, num_sequences, tile_tokens)
        first_token = (tile - tl.load(query_start + sequence) // tile_tokens - sequence) * tile_tokens
    first_row = tl.load(query_start + sequence)
    query_len = tl.load(query_start + sequence + 1) - first_row
    if decodes:
        if query_len != 1:
            return
    else:
        if (query_len == 1) | (first_token >= query_len):
            return
    context_len = tl.load(context_lens + sequence)
    # Not causal: query positions begin at the last key, so that all keys are seen.
    first_position = context_len - query_len + first_token if causal else context_len - 1

    row = tl.arange(0, tile_rows)
    column = tl.arange(0, head_columns)[None, :]
    token = first_token + row // groups
    head = kv_head * groups + row % groups
    inside = ((token < query_len) & (row < tile_tokens * groups))[:, None] & (column < head_dim)
    wide_row = (first_row + token).to(tl.int64)
    queries = tl.load(query + (wide_row * query_stride + head * head_dim)[:, None] + column, mask=inside, other=0.0)
    position = first_position + row // groups
    last = position
    high = tl.minimum(first_position + tile_tokens, context_len)
    if has_ends:
        last = tl.load(visible_ends + wide_row, mask=token < query_len, other=0)
        high = tl.max(last, axis=0) + 1
    head_bias = bias + head * num_distances

    low = first_key(first_position, window, chunked) if window > 0 else 0
    first_tile = low // tile_keys
    share = tl.cdiv(tl.cdiv(high, tile_keys) - first_tile, num_splits)
    begin = first_tile + part * share
    end = tl.minimum(begin + share, tl.cdiv(high, tile_keys))
    # Tiles before `seen_by_all` need no mask, unless there is a window.
    seen_by_all = begin if window > 0 else tl.maximum(tl.minimum((first_position + 1) // tile_keys, end), begin)

    if has_sinks:  # the first split begins with the sink, whose value is zero
        sunk, one = begun(tl.load(sinks + head))
        largest = tl.where(part == 0, sunk, float("-inf"))
        total = tl.where(part == 0, one, 0.0)
    else:
        largest = tl.full([tile_rows], float("-inf"), tl.float32)
        total = tl.zeros([tile_rows], tl.float32)
    weighted = tl.zeros([tile_rows, head_columns], tl.float32)
    head_cache = layer_cache + kv_head * (head_dim + scale_bytes)
    table = block_tables + sequence.to(tl.int64) * table_stride
    for index in range(begin, seen_by_all):
        largest, total, weighted = attend_tile(
            queries, largest, total, weighted, position, last, index * tile_keys, low, high, head_cache, table,
            head_bias, num_distances, block_stride, part_stride, scale, False,
            num_kv_heads, head_dim, scale_bytes, block_size, window, chunked, soft_cap, biased, tile_keys,
            head_columns,
        )  # fmt: skip
    for index in range(seen_by_all, end):
        largest, total, weighted = attend_tile(
            queries, largest, total, weighted, position, last, index * tile_keys, low, high, head_cache, table,
            head_bias, num_distances, block_stride, part_stride, scale, True,
            num_kv_heads, head_dim, scale_bytes, block_size, window, chunked, soft_cap, biased, tile_keys,
            head_columns,
        )  # fmt: skip

    empty = total == 0  # a padding row, or a split after the last key tile
    divisor = tl.where(empty, 1.0, total)
    result = weighted * (1.0 / divisor)[:, None]
    place = wide_row * (num_kv_heads * groups) + head
    if split:
        place = place * num_splits + part
        log_sum = tl.where(empty, float("-inf"), largest + tl.log2(divisor))
        tl.store(log_sums + place, log_sum, mask=(token < query_len) & (row < tile_tokens * groups))
    tl.store(output + place[:, None] * head_dim + column, result.to(output.dtype.element_ty), mask=inside)
