"""Sequences that begin with the same blocks are computed together, with the bits that each has alone."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.attention import narrow_cache
from kernels.inputs import AttentionMetadata

CPU = torch.device("cpu")
BLOCK = 16
# Query tokens, tokens of its own, and what it begins with: so many tokens of so many tokens that others begin with too.
CASES = {
    "eight behind one prompt": [(1, 40, (0, 2048))] * 8,
    "prompts of every length": [(1, 600, (0, length)) for length in (0, 496, 512, 528, 1024, 1536, 2048)],
    "no token of their own in a part": [(1, 1, (0, 512)), (1, 1, (0, 512)), (1, 1, (0, 1024)), (1, 1, (0, 1024))],
    "two prompts and others between": [(1, 33, (number % 3, 1024)) for number in range(15)],
    "more than an item takes": [(1, 5 + number, (0, 1024)) for number in range(70)],
    "prompts and guesses between": [(1, 9, (0, 1024)), (40, 60, (0, 1024)), (1, 9, (0, 1024)), (3, 9, (0, 1024))],
}


def shared_case(
    lens: list[tuple[int, int, tuple[int, int]]], heads: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, AttentionMetadata, AttentionMetadata]:
    """Queries, a cache, and tables in which beginnings are the same blocks, and in which each has a copy."""
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(3)
    shape = (2, BLOCK, num_kv_heads, head_dim)
    prompts = [torch.randn(2048 // BLOCK, *shape, generator=generator) for _ in range(3)]
    blocks = [block for prompt in prompts for block in prompt]
    shared, own = [], []
    for _, num_own, (which, length) in lens:
        ours = torch.randn(-(-num_own // BLOCK), *shape, generator=generator)
        first, count = len(blocks), length // BLOCK
        blocks += ours
        copies = range(len(blocks), len(blocks) + count)
        blocks += prompts[which][:count]
        rest = list(range(first, first + len(ours)))
        shared.append([*range(which * 2048 // BLOCK, which * 2048 // BLOCK + count), *rest])
        own.append([*copies, *rest])
    contexts = [num_own + length for _, num_own, (_, length) in lens]
    queries = [num_queries for num_queries, _, _ in lens]
    width = max(map(len, shared))
    query = torch.randn(sum(queries), num_heads, head_dim, generator=generator).to(dtype)
    found = [
        AttentionMetadata.build(
            queries, contexts, torch.tensor([[*table, *[2**30] * (width - len(table))] for table in tables]), CPU
        )
        for tables in (shared, own)
    ]
    return query, torch.stack(blocks).to(dtype), found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 40), (40, 1, 96)], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_shared_blocks_give_the_bits_that_copies_of_them_give(
    kernels: ModuleType, case: list[tuple[int, int, tuple[int, int]]], heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    query, cache, shared, own = shared_case(case, heads, dtype)
    together = kernels.paged_attention(query, cache, shared, 0.3)
    assert together.isfinite().all()
    assert torch.equal(together, kernels.paged_attention(query, cache, own, 0.3))
    capped = [kernels.paged_attention(query, cache, metadata, 0.3, None, 2.0) for metadata in (shared, own)]
    assert torch.equal(*capped)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_so_they_do_where_whole_contexts_are_seen_and_in_a_cache_of_8_bits(
    kernels: ModuleType, case: list[tuple[int, int, tuple[int, int]]]
) -> None:
    query, cache, shared, own = shared_case(case, (4, 2, 64), torch.float32)
    seen = [kernels.paged_attention(query, cache, metadata, 0.3, causal=False) for metadata in (shared, own)]
    assert torch.equal(*seen)
    if max(num_queries for num_queries, _, _ in case) == 1:
        each = [
            kernels.paged_attention(
                query[row : row + 1],
                cache,
                AttentionMetadata.build([1], [int(own.context_lens[row])], own.block_tables[row : row + 1], CPU),
                0.3,
            )
            for row in range(len(case))
        ]
        assert torch.equal(kernels.paged_attention(query, cache, shared, 0.3), torch.cat(each))
    narrow = narrow_cache.narrowed(cache)
    for queries in (query, query.to(torch.bfloat16)):
        found = [kernels.paged_attention(queries, narrow, metadata, 0.3) for metadata in (shared, own)]
        assert found[0].isfinite().all()
        assert torch.equal(*found)
    windows = [kernels.paged_attention(query, cache, metadata, 0.3, 700) for metadata in (shared, own)]
    assert torch.equal(*windows)
