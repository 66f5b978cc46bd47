"""Batch-invariant paged attention: a token's result has the same bits in any batch, chunk or captured CUDA graph.

    `part`      512 keys that begin at a multiple of 512, as in the CPU kernels.
    `program`   One tile of query rows for one key head, over some or all parts.

Parts are computed separately (largest score, sum of weights, weighted values), and merged in order by `merge_part`. If
tiles are few, several programs share the parts of a tile, and `merge_parts` merges with the same arithmetic. Decodes
and chunks use one compiled kernel with one tile size; a row's arithmetic does not depend on its tile's other rows, so
sequences may share a tile. With `metadata.shared`, a first launch computes each shared part once, and the rows of a
second launch continue from it.

Two assumptions, with equal bits found on an H100: a tensor core instruction sums a row in the same order at any place
of a tile, and the compiler translates `merge_part` equally in both kernels, for which its roundings are explicit. Sizes
are not tuned by measurement. Oracles: `kernels.reference.paged_attention`, and other batches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.options import check_attention_options, check_no_options
from kernels.inputs import PART_KEYS, AttentionMetadata
from kernels.triton.attention.attention_tiles import (
    attend_tile,
    columns_of,
    first_key,
    num_processors,
    sequence_of_tile,
    tile_keys_of,
)
from kernels.triton.attention.latent_attention import latent_attention
from kernels.triton.attention.merge_parts import begun, finished, merge_part, merge_parts
from kernels.triton.launch import OPTIONS

_NUM_WARPS = 4
_NUM_STAGES = 3
_MAX_TILE_KEYS = 32
"""Keys of a tile. Heads of 128 at compute capability 9.0: a thread spills 48 bytes of registers with 32 keys, 200 with
64."""
_MAX_PARTIAL_BYTES = 2**28
"""Bytes of partial results for `merge_parts`. Above, one program computes all parts of a tile, with the same bits."""


def attention_by_position(
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
    ends = metadata.visible_ends
    if layer_cache.shape[1] == 1:
        check_no_options(window, soft_cap, bias, sinks, ends, causal=causal)
        return latent_attention(query, layer_cache, metadata, scale, by_position=True)
    check_attention_options(query, window, soft_cap, bias, causal, sinks, chunked, ends)
    num_tokens, num_heads, head_dim = query.shape
    num_sequences, num_kv_heads = len(metadata.context_lens), layer_cache.shape[3]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return output
    groups = num_heads // num_kv_heads
    tile_rows = _tile_rows(groups, head_dim, query.dtype)
    tile_tokens = tile_rows // groups
    only_decodes = metadata.max_query_len == 1
    num_tiles = num_sequences if only_decodes else num_tokens // tile_tokens + num_sequences
    num_parts = triton.cdiv(metadata.max_context_len, PART_KEYS)
    if window is not None and ends is None:  # a window may begin inside a part
        num_parts = min(num_parts, triton.cdiv(window + tile_tokens - 1, PART_KEYS) + 1)
    num_programs = min(num_parts, 2 * num_processors(query.device) // (num_tiles * num_kv_heads))
    apart = num_programs > 1 and num_parts * num_tokens * num_heads * head_dim * 4 <= _MAX_PARTIAL_BYTES
    shared = metadata.shared if only_decodes and window is None and bias is None and causal else None

    # Results are in the order of the parts; a row may have fewer than `room`.
    room = num_parts if apart else 0 if shared is None else min(num_parts, shared.most_parts)
    partial = torch.empty((num_tokens, num_heads, room, head_dim), device=query.device)
    sums = torch.empty((num_tokens, num_heads, room, 2), device=query.device)
    counts = torch.empty((num_tokens, num_heads) if apart else 0, dtype=torch.int32, device=query.device)

    def launch(together: bool, num_tiles: int, num_programs: int) -> None:
        _attention_by_position_kernel[(num_tiles * num_kv_heads, num_programs)](
            query,
            layer_cache,
            output,
            partial,
            sums,
            counts,
            metadata.query_start,
            metadata.context_lens,
            metadata.block_tables,
            torch.empty(0, device=query.device) if bias is None else bias,
            torch.empty(0, device=query.device) if sinks is None else sinks,
            metadata.query_start if ends is None else ends,  # unread without ends
            # Unread without shared parts.
            *((metadata.query_start,) * 3 if shared is None else (shared.items, shared.rows, shared.num_parts)),
            num_sequences,
            room,
            0 if bias is None else bias.shape[1],
            query.stride(0),
            layer_cache.stride(0),
            layer_cache.stride(1),
            metadata.block_tables.stride(0),
            scale,
            int(only_decodes),
            int(together),
            int(together or apart),
            int(shared is not None),
            int(ends is not None),
            groups=groups,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=layer_cache.shape[2],
            window=window or 0,
            chunked=chunked,
            soft_cap=soft_cap or 0.0,
            biased=bias is not None,
            has_sinks=sinks is not None,
            causal=causal,
            tile_rows=tile_rows,
            tile_keys=min(_MAX_TILE_KEYS, tile_keys_of(head_dim, query.dtype)),
            head_columns=columns_of(head_dim),
            part_keys=PART_KEYS,
            num_warps=_NUM_WARPS,
            num_stages=_NUM_STAGES,
            **OPTIONS,
        )

    if shared is not None:
        launch(together=True, num_tiles=len(shared.items), num_programs=1)
    launch(together=False, num_tiles=num_tiles, num_programs=num_programs if apart else 1)
    if apart:
        merge_parts(partial, sums, counts, sinks, output)
    return output


def shared_tokens(groups: int, head_dim: int, dtype: torch.dtype) -> int:
    return _tile_rows(groups, head_dim, dtype) // groups


def _tile_rows(groups: int, head_dim: int, dtype: torch.dtype) -> int:
    """Query rows of a tile. Hopper's warpgroup instruction needs at least 64. Large heads and float32 have fewer,
    because a program holds two weighted sums in registers: of the part, and of all earlier parts."""
    most = 2**13 // columns_of(head_dim) // (16 if dtype is torch.float32 else 1)
    return max(16, min(64, most), int(triton.next_power_of_2(groups)))


@triton.jit(
    do_not_specialize=[
        "num_sequences", "room", "num_distances", "table_stride", "only_decodes", "together", "apart", "shares",
        "has_ends",
    ]
)  # fmt: skip
def _attention_by_position_kernel(
    query,
    layer_cache,
    output,
    partial,
    sums,
    counts,
    query_start,
    context_lens,
    block_tables,
    bias,
    sinks,
    visible_ends,
    items,
    item_rows,
    num_shared_parts,
    num_sequences,
    room,
    num_distances,
    query_stride,
    block_stride,
    part_stride,
    table_stride,
    scale,
    only_decodes,
    together,
    apart,
    shares,
    has_ends,
    groups: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,
    chunked: tl.constexpr,
    soft_cap: tl.constexpr,
    biased: tl.constexpr,
    has_sinks: tl.constexpr,
    causal: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    head_columns: tl.constexpr,
    part_keys: tl.constexpr,
):
    """Compute one tile. A launch's flags are not constexpr, because kernels compiled for each might round differently.
    together: the tile has rows of several sequences, and computes a shared part. apart: parts' results go to `partial`
    and `sums`. shares: rows continue from the results of the launch with `together`."""
    tile_tokens: tl.constexpr = tile_rows // groups
    row = tl.arange(0, tile_rows)
    member = row // groups
    column = tl.arange(0, head_columns)[None, :]
    kv_head = tl.program_id(0) % num_kv_heads
    head = kv_head * groups + row % groups
    num_shared = tl.full([], 0, tl.int32)
    if together != 0:
        item = items + tl.program_id(0) // num_kv_heads * 3
        first_part, first_member, num_members = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        sequence = tl.load(item_rows + first_member, mask=num_members > 0, other=0)
        token = tl.load(item_rows + first_member + member, mask=member < num_members, other=0)
        # Shared keys come before all query tokens, which therefore see all of them.
        last_part = first_part + tl.minimum(num_members, 1)
        low = first_part * part_keys
        high = last_part * part_keys
        position = high + member
        last = position
        first_place = tl.full([], 0, tl.int32)  # part 0: with shared parts there is no window
    else:
        tile = tl.program_id(0) // num_kv_heads
        first_token = tl.full([], 0, tl.int32)
        if only_decodes != 0:
            sequence = tile
        else:
            tile = tl.num_programs(0) // num_kv_heads - 1 - tile  # a prompt's last tile has the most keys
            sequence = sequence_of_tile(tile, query_start, num_sequences, tile_tokens)
            first_token = (tile - tl.load(query_start + sequence) // tile_tokens - sequence) * tile_tokens
        first_row = tl.load(query_start + sequence)
        num_members = tl.minimum(tl.load(query_start + sequence + 1) - first_row - first_token, tile_tokens)
        context_len = tl.load(context_lens + sequence)
        # Not causal: query positions begin at the last key, so that all keys are seen.
        first_position = context_len - 1
        if causal:
            first_position = context_len - (tl.load(query_start + sequence + 1) - first_row) + first_token
        token = first_row + first_token + member
        position = first_position + member
        last = position
        low = first_key(first_position, window, chunked) if window > 0 else tl.full([], 0, tl.int32)
        high = tl.minimum(first_position + tile_tokens, context_len)
        if has_ends != 0:
            last = tl.load(visible_ends + token, mask=member < num_members, other=0)
            high = tl.max(last, axis=0) + 1
        first_part = low // part_keys
        last_part = tl.cdiv(tl.where(num_members > 0, high, 0), part_keys)
        first_place = first_part
        if shares != 0:
            num_shared = tl.load(num_shared_parts + sequence)

    is_row = (member < num_members) & (row < tile_tokens * groups)
    inside = is_row[:, None] & (column < head_dim)
    wide_token = token.to(tl.int64)
    queries = tl.load(query + (wide_token * query_stride + head * head_dim)[:, None] + column, mask=inside, other=0.0)
    place = wide_token * (num_kv_heads * groups) + head
    head_cache = layer_cache + kv_head * head_dim
    table = block_tables + sequence.to(tl.int64) * table_stride
    head_bias = bias + head * num_distances

    if has_sinks:
        largest, total = begun(tl.load(sinks + head))
    else:
        largest = tl.full([tile_rows], float("-inf"), tl.float32)
        total = tl.zeros([tile_rows], tl.float32)
    weighted = tl.zeros([tile_rows, head_columns], tl.float32)
    # `disable_licm` keeps a part's values out of the inner loop's registers; otherwise, a thread spills 190 more bytes.
    for part in tl.range(first_part + tl.program_id(1), last_part, tl.num_programs(1), disable_licm=True):
        begin = tl.maximum(low, part * part_keys) // tile_keys
        end = tl.cdiv(tl.minimum(high, (part + 1) * part_keys), tile_keys)
        part_largest = tl.full([tile_rows], float("-inf"), tl.float32)
        part_total = tl.zeros([tile_rows], tl.float32)
        part_weighted = tl.zeros([tile_rows, head_columns], tl.float32)
        for index in range(begin, tl.where(part < num_shared, begin, end)):
            part_largest, part_total, part_weighted = attend_tile(
                queries, part_largest, part_total, part_weighted, position, last, index * tile_keys, low, high,
                head_cache, table, head_bias, num_distances, block_stride, part_stride, scale, True,
                num_kv_heads, head_dim, 0, block_size, window, chunked, soft_cap, biased, tile_keys, head_columns,
            )  # fmt: skip
        left = place * room + part - first_place
        if apart != 0:
            if part >= num_shared:  # stored by the launch with `together`
                tl.store(sums + left * 2, part_largest, mask=is_row)
                tl.store(sums + left * 2 + 1, part_total, mask=is_row)
                tl.store(partial + left[:, None] * head_dim + column, part_weighted, mask=inside)
        else:
            if part < num_shared:
                part_largest = tl.load(sums + left * 2, mask=is_row, other=float("-inf"))
                part_total = tl.load(sums + left * 2 + 1, mask=is_row, other=0.0)
                part_weighted = tl.load(partial + left[:, None] * head_dim + column, mask=inside, other=0.0)
            largest, total, weighted = merge_part(largest, total, weighted, part_largest, part_total, part_weighted)

    if apart == 0:
        result = finished(total, weighted)
        tl.store(output + place[:, None] * head_dim + column, result.to(output.dtype.element_ty), mask=inside)
    if (together == 0) & (apart != 0) & (tl.program_id(1) == 0):
        tl.store(counts + place, last_part - first_part + tl.zeros([tile_rows], tl.int32), mask=is_row)
