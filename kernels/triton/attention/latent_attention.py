"""Paged attention for a cache whose keys are also the values: multi-head latent attention (DeepSeek-AI, 2024).

    `query`         [num_tokens, num_heads, head_dim], with any stride between tokens.
    `layer_cache`   [num_blocks, 1, block_size, 1, head_dim], a strided view of one layer: one key head for all heads.
    `program`       One tile of a sequence's query rows (tokens by heads), over one or several parts of the keys.

A head, usually 512 + 64 elements, is computed in two pieces, because tiles have powers of two. Keys are loaded once for
both products. A tile may begin and end inside a token's heads, of which there may be 128.

With `by_position`, the kernel is batch-invariant as in `attention_by_position`: parts have 512 keys, and one kernel
with one tile size merges them in order. Otherwise, a program has one part, and decodes have as many programs as the
device runs at once. In both cases, `merge_parts` merges the results of several programs. Grids depend on shapes and the
metadata's maxima only, so that a CUDA graph of decodes is valid for all contexts up to its maximum. Parts that decodes
share are not computed together: a decode's heads already share each loaded key.

Not yet run on a GPU: tested in Triton's interpreter, and compiled. Oracle: `kernels.reference.paged_attention`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.inputs import PART_KEYS, AttentionMetadata
from kernels.triton.attention.attention_tiles import (
    HOPPER_SHARED_MEMORY,
    num_processors,
    sequence_of_tile,
    shared_memory,
)
from kernels.triton.attention.merge_parts import finished, merge_part, merge_parts
from kernels.triton.launch import OPTIONS

_MAX_PARTS = 64
"""Programs for one tile, unless results are batch-invariant."""
_MAX_PARTIAL_BYTES = 2**28
"""Bytes of partial results. Above, batch-invariant programs compute all parts of a tile, with the same bits."""


def latent_attention(
    query: Tensor, layer_cache: Tensor, metadata: AttentionMetadata, scale: float, *, by_position: bool
) -> Tensor:
    """Causal attention without other options."""
    num_tokens, num_heads, head_dim = query.shape
    num_sequences = len(metadata.context_lens)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return output
    only_decodes = metadata.max_query_len == 1
    tile = _tile(num_heads * metadata.max_query_len, query.dtype, query.device, by_position=by_position)
    if only_decodes:
        num_tiles = num_sequences * triton.cdiv(num_heads, tile.rows)
    else:
        num_tiles = num_tokens * num_heads // tile.rows + num_sequences
    num_parts = triton.cdiv(metadata.max_context_len, PART_KEYS if by_position else tile.keys)
    num_programs = min(num_parts, max(1, 2 * num_processors(query.device) // num_tiles))
    if by_position:
        apart = num_programs > 1 and num_parts * num_tokens * num_heads * head_dim * 4 <= _MAX_PARTIAL_BYTES
    else:
        num_parts = num_programs = min(num_programs, _MAX_PARTS)
        apart = num_programs > 1

    room = num_parts if apart else 0
    partial = torch.empty((num_tokens, num_heads, room, head_dim), device=query.device)
    sums = torch.empty((num_tokens, num_heads, room, 2), device=query.device)
    counts = torch.empty((num_tokens, num_heads) if apart else 0, dtype=torch.int32, device=query.device)
    front = max(16, triton.next_power_of_2(head_dim) // 2)
    _latent_attention_kernel[(num_tiles, num_programs if apart else 1)](
        query,
        layer_cache,
        output,
        partial,
        sums,
        counts,
        metadata.query_start,
        metadata.context_lens,
        metadata.block_tables,
        num_sequences,
        room,
        query.stride(0),
        layer_cache.stride(0),
        metadata.block_tables.stride(0),
        scale,
        int(only_decodes),
        int(apart),
        by_position=by_position,
        num_heads=num_heads,
        head_dim=head_dim,
        block_size=layer_cache.shape[2],
        tile_rows=tile.rows,
        tile_keys=tile.keys,
        front=front,
        back=max(16, triton.next_power_of_2(max(1, head_dim - front))),
        part_keys=PART_KEYS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **OPTIONS,
    )
    if apart:
        merge_parts(partial, sums, counts, None, output)
    return output


class _Tile(NamedTuple):
    """A tile's shape, and compile options."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def _tile(num_rows: int, dtype: torch.dtype, device: torch.device, *, by_position: bool) -> _Tile:
    """num_rows: of the longest sequence."""
    if dtype is torch.float32:
        return _Tile(16, 16, 8, 1)
    if by_position:
        return _Tile(16, 32, 8, 2)
    if num_rows > 32 and shared_memory(device) >= HOPPER_SHARED_MEMORY:
        return _Tile(64, 32, 8, 2)
    return _Tile(16, 32, 4, 2)


@triton.jit
def _attend_keys(
    front_queries,
    back_queries,
    position,
    begin,
    end,
    context_len,
    layer_cache,
    table,
    block_stride,
    scale,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    front: tl.constexpr,
    back: tl.constexpr,
):
    """Online softmax over the tiles of keys [begin, end). Returns largest score (log2), sum of weights, and both pieces
    of the weighted keys."""
    log2_e: tl.constexpr = 1.4426950408889634
    front_column, back_column = tl.arange(0, front)[None, :], front + tl.arange(0, back)[None, :]
    largest = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    front_sum = tl.zeros([tile_rows, front], tl.float32)
    back_sum = tl.zeros([tile_rows, back], tl.float32)
    factor = scale * log2_e
    for index in range(begin, end):
        key = index * tile_keys + tl.arange(0, tile_keys)
        exists = key < context_len
        block = tl.load(table + key // block_size, mask=exists, other=0)
        place = (layer_cache + block.to(tl.int64) * block_stride + key % block_size * head_dim)[:, None]
        # Missing keys must be zeros, because 0 times NaN is NaN.
        front_keys = tl.load(place + front_column, mask=exists[:, None] & (front_column < head_dim), other=0.0)
        back_keys = tl.load(place + back_column, mask=exists[:, None] & (back_column < head_dim), other=0.0)
        scores = tl.dot(front_queries, tl.trans(front_keys), input_precision="ieee")
        scores = tl.dot(back_queries, tl.trans(back_keys), scores, input_precision="ieee")
        scores = tl.where(exists[None, :] & (key[None, :] <= position[:, None]), scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1) * factor)
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # -inf: no key yet
        weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, axis=1)
        narrow = weights.to(front_keys.dtype)
        front_sum = tl.dot(narrow, front_keys, front_sum * shrink[:, None], input_precision="ieee")
        back_sum = tl.dot(narrow, back_keys, back_sum * shrink[:, None], input_precision="ieee")
        largest = new_largest
    return largest, total, front_sum, back_sum


@triton.jit
def _store(
    places, front_sum, back_sum, is_row, head_dim: tl.constexpr, front: tl.constexpr, back: tl.constexpr
):  # fmt: skip
    """Store both pieces of heads. places: [rows] addresses."""
    front_column, back_column = tl.arange(0, front)[None, :], front + tl.arange(0, back)[None, :]
    kind = places.dtype.element_ty
    tl.store(places[:, None] + front_column, front_sum.to(kind), mask=is_row[:, None] & (front_column < head_dim))
    tl.store(places[:, None] + back_column, back_sum.to(kind), mask=is_row[:, None] & (back_column < head_dim))


@triton.jit(do_not_specialize=["num_sequences", "room", "table_stride", "only_decodes", "apart"])
def _latent_attention_kernel(
    query,
    layer_cache,
    output,
    partial,
    sums,
    counts,
    query_start,
    context_lens,
    block_tables,
    num_sequences,
    room,
    query_stride,
    block_stride,
    table_stride,
    scale,
    only_decodes,
    apart,
    by_position: tl.constexpr,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    front: tl.constexpr,
    back: tl.constexpr,
    part_keys: tl.constexpr,
):
    """apart: parts' results go to `partial` and `sums`. Flags are not constexpr, because kernels compiled for each
    might round differently."""
    if only_decodes != 0:
        tiles: tl.constexpr = (num_heads + tile_rows - 1) // tile_rows
        sequence = tl.program_id(0) // tiles
        first = tl.program_id(0) % tiles * tile_rows
    else:
        tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a prompt's last tile has the most keys
        sequence = sequence_of_tile(tile, query_start, num_sequences, tile_rows, num_heads)
        first = (tile - tl.load(query_start + sequence) * num_heads // tile_rows - sequence) * tile_rows
    first_token = tl.load(query_start + sequence)
    query_len = tl.load(query_start + sequence + 1) - first_token
    num_rows = query_len * num_heads
    if first >= num_rows:
        return
    context_len = tl.load(context_lens + sequence)
    row = first + tl.arange(0, tile_rows)
    position = context_len - query_len + row // num_heads
    is_row = row < num_rows
    last_row = tl.minimum(first + tile_rows, num_rows) - 1
    num_keys = context_len - query_len + last_row // num_heads + 1
    num_keys = tl.where(context_len > 0, num_keys, 0)  # a padding row

    token = (first_token + row // num_heads).to(tl.int64)
    place = token * num_heads + row % num_heads
    start = query + token * query_stride + row % num_heads * head_dim
    front_column, back_column = tl.arange(0, front)[None, :], front + tl.arange(0, back)[None, :]
    front_queries = tl.load(start[:, None] + front_column, is_row[:, None] & (front_column < head_dim), 0.0)
    back_queries = tl.load(start[:, None] + back_column, is_row[:, None] & (back_column < head_dim), 0.0)
    table = block_tables + sequence.to(tl.int64) * table_stride

    num_tiles = tl.cdiv(num_keys, tile_keys)
    part = tl.program_id(1)
    part_tiles = part_keys // tile_keys if by_position else tl.maximum(tl.cdiv(num_tiles, tl.num_programs(1)), 1)
    num_parts = tl.cdiv(num_tiles, part_tiles)
    if (apart != 0) & (part == 0):
        tl.store(counts + place, num_parts + tl.zeros([tile_rows], tl.int32), mask=is_row)

    if by_position:
        largest = tl.full([tile_rows], float("-inf"), tl.float32)
        total = tl.zeros([tile_rows], tl.float32)
        front_sum = tl.zeros([tile_rows, front], tl.float32)
        back_sum = tl.zeros([tile_rows, back], tl.float32)
        # See `attention_by_position` for `disable_licm`.
        for part in tl.range(tl.program_id(1), num_parts, tl.num_programs(1), disable_licm=True):
            part_largest, part_total, part_front, part_back = _attend_keys(
                front_queries, back_queries, position, part * part_tiles,
                tl.minimum((part + 1) * part_tiles, num_tiles), context_len, layer_cache, table, block_stride, scale,
                head_dim, block_size, tile_rows, tile_keys, front, back,
            )  # fmt: skip
            if apart != 0:
                left = place * room + part
                tl.store(sums + left * 2, part_largest, mask=is_row)
                tl.store(sums + left * 2 + 1, part_total, mask=is_row)
                _store(partial + left * head_dim, part_front, part_back, is_row, head_dim, front, back)
            else:
                _, _, back_sum = merge_part(largest, total, back_sum, part_largest, part_total, part_back)
                largest, total, front_sum = merge_part(largest, total, front_sum, part_largest, part_total, part_front)
    else:
        largest, total, front_sum, back_sum = _attend_keys(
            front_queries, back_queries, position, part * part_tiles, tl.minimum((part + 1) * part_tiles, num_tiles),
            context_len, layer_cache, table, block_stride, scale,
            head_dim, block_size, tile_rows, tile_keys, front, back,
        )  # fmt: skip
        if apart != 0:
            left = place * room + part
            tl.store(sums + left * 2, largest, mask=is_row)
            tl.store(sums + left * 2 + 1, total, mask=is_row)
            _store(partial + left * head_dim, front_sum, back_sum, is_row, head_dim, front, back)

    if apart == 0:
        front_sum, back_sum = finished(total, front_sum), finished(total, back_sum)
        _store(output + place * head_dim, front_sum, back_sum, is_row, head_dim, front, back)
