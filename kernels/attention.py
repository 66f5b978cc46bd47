"""Paged attention in eager torch: every sequence of a step attends to its own blocks, prefill chunks and decodes alike.

Which cache blocks a step reads is worked out once, in `AttentionMetadata`, and serves all layers. Rows with one query
token are gathered and computed together; longer chunks are computed one by one. Whatever lies in slots that a
sequence does not own, NaN included, never reaches its result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class DecodeBucket:
    """Sequences with one query token each and contexts of similar length."""

    rows: Tensor
    """[n] int64: their rows of the query."""
    block_tables: Tensor
    """[n, width] int64: their blocks, padded with block 0."""
    mask: Tensor
    """[n, 1, 1, width * block_size] bool: the slots that hold a token of theirs."""
    padding: tuple[Tensor, Tensor, Tensor]
    """(row, block, offset) of every slot that does not."""


@dataclass(frozen=True)
class Chunk:
    """A sequence with several query tokens."""

    start: int
    """Its first row of the query."""
    stop: int
    """Past its last row of the query."""
    block_table: Tensor
    """[num_blocks] int64: just the blocks that its context needs."""
    context_len: int
    """Tokens to attend to; the query tokens are the last of them."""
    mask: Tensor | None
    """[stop - start, context_len] bool, or None where the chunk is the whole context and plain causality holds."""


@dataclass(frozen=True)
class AttentionMetadata:
    """A step's queries and the blocks that each may read."""

    buckets: tuple[DecodeBucket, ...]
    chunks: tuple[Chunk, ...]

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Tensor,
        block_size: int,
        device: torch.device,
    ) -> "AttentionMetadata":
        """Sort a step's sequences into buckets and chunks.

        query_lens: query tokens of each sequence, whose rows follow each other in the query; context_lens: its tokens
        up to and including these; block_tables: [num_sequences, any width >= the blocks that the context needs] int64
        in host memory; device: where the step runs.
        """
        starts = list(accumulate(query_lens, initial=0))
        chunks = []
        decodes: dict[int, list[int]] = {}
        for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
            num_blocks = -(-context_len // block_size)
            if query_len == 1:
                # Doubling widths: at most half of a bucket's gathered slots are padding, whatever the mix of lengths.
                decodes.setdefault(num_blocks.bit_length(), []).append(row)
                continue
            mask = None
            if query_len < context_len:
                query_positions = torch.arange(context_len - query_len, context_len, device=device)
                mask = torch.arange(context_len, device=device) <= query_positions[:, None]
            table = block_tables[row, :num_blocks].to(device)
            chunks.append(Chunk(starts[row], starts[row + 1], table, context_len, mask))
        buckets = tuple(
            _bucket(
                torch.tensor([starts[row] for row in rows]),
                torch.tensor([context_lens[row] for row in rows]),
                block_tables[rows],
                block_size,
                device,
            )
            for rows in decodes.values()
        )
        return cls(buckets, tuple(chunks))


def paged_attention(query: Tensor, layer_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    """`softmax(q kᵀ * scale) v` of each query token over its sequence's tokens up to itself. (Kwon et al., 2023.)

    query: [num_tokens, num_heads, head_dim]; layer_cache: [num_blocks, 2, block_size, num_kv_heads, head_dim], where
    the step's own keys and values are stored already; num_heads is a multiple of num_kv_heads, and each key head
    serves as many consecutive query heads. Returns the shape and dtype of query.
    """
    output = torch.empty_like(query)
    for bucket in metadata.buckets:
        output[bucket.rows] = _attend_decodes(query[bucket.rows], layer_cache, bucket, scale)
    for chunk in metadata.chunks:
        output[chunk.start : chunk.stop] = _attend_chunk(query[chunk.start : chunk.stop], layer_cache, chunk, scale)
    return output


def _bucket(
    rows: Tensor, context_lens: Tensor, block_tables: Tensor, block_size: int, device: torch.device
) -> DecodeBucket:
    width = -(-int(context_lens.max()) // block_size)
    owned = torch.arange(width * block_size) < context_lens[:, None]
    row, slot = torch.nonzero(~owned, as_tuple=True)
    # Past its own blocks a table may hold anything; block 0 always exists.
    tables = block_tables[:, :width].where(owned[:, ::block_size], 0)
    return DecodeBucket(
        rows=rows.to(device),
        block_tables=tables.to(device),
        mask=owned.to(device)[:, None, None, :],
        padding=(row.to(device), (slot // block_size).to(device), (slot % block_size).to(device)),
    )


def _attend_decodes(query: Tensor, layer_cache: Tensor, bucket: DecodeBucket, scale: float) -> Tensor:
    rows, num_heads, head_dim = query.shape
    num_kv_heads = layer_cache.shape[3]
    blocks = layer_cache[bucket.block_tables]  # [rows, width, 2, block_size, num_kv_heads, head_dim]
    row, block, offset = bucket.padding
    # The mask alone would not do: 0 * NaN is NaN.
    blocks[row, block, :, offset] = 0
    keys = blocks[:, :, 0].reshape(rows, -1, num_kv_heads, head_dim).transpose(1, 2)
    values = blocks[:, :, 1].reshape(rows, -1, num_kv_heads, head_dim).transpose(1, 2)
    # The query heads that share a key head stand as its query positions, so that no key is repeated.
    grouped = query.view(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    attended = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=bucket.mask, scale=scale)
    return attended.reshape(rows, num_heads, head_dim)


def _attend_chunk(query: Tensor, layer_cache: Tensor, chunk: Chunk, scale: float) -> Tensor:
    num_heads, num_kv_heads = query.shape[1], layer_cache.shape[3]
    blocks = layer_cache[chunk.block_table]  # [num_blocks, 2, block_size, num_kv_heads, head_dim]
    keys, values = (
        blocks[:, part]
        .flatten(0, 1)[: chunk.context_len]
        .transpose(0, 1)
        .repeat_interleave(num_heads // num_kv_heads, dim=0)[None]
        for part in (0, 1)
    )
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None, scale=scale
    )
    return attended[0].transpose(0, 1)
