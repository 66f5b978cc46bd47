"""The compiled CPU kernels against the eager ones, for every instruction set that this machine can run."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from image_metadata import with_images
from torch import Tensor

from kernels import reference
from kernels.attention import narrow_cache
from kernels.inputs import AttentionMetadata, rotary_tables
from kernels.ops import Activation, ClampedSwiglu, LoraWeights

NAN = float("nan")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
CPU = torch.device("cpu")


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


def attention_case(
    lens: list[tuple[int, int]],
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    window: int | None = None,
    *,
    chunked: bool = False,
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Queries, a cache that is NaN wherever no sequence's window or chunk reaches, and the metadata.

    lens: (query tokens, context) of each sequence; heads: query heads, key heads, head size.
    """
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(1)
    counts = [-(-context // block_size) for _, context in lens]
    pool = torch.full((sum(counts) + 2, 3, 2, block_size, num_kv_heads, head_dim), NAN, dtype=dtype)
    shuffled = iter((torch.randperm(sum(counts), generator=generator) + 1).tolist())
    tables = torch.full((len(lens), max(counts, default=0) + 1), 2**30)
    for row, ((query_len, context), count) in enumerate(zip(lens, counts, strict=True)):
        tables[row, :count] = torch.tensor([next(shuffled) for _ in range(count)])
        first = 0 if window is None else max(0, context - query_len - window + 1)
        first = (context - query_len) // (window or 1) * (window or 1) if chunked else first
        positions = torch.arange(first, context)
        slots = tables[row, positions // block_size], positions % block_size
        found = torch.randn(len(positions), 2, num_kv_heads, head_dim, generator=generator)
        pool[slots[0], 1, :, slots[1]] = found.to(dtype)
        tables[row, : first // block_size] = -1  # given back: must not be looked at
    # Rows that lie further apart than they are long, as parts of a fused projection do.
    query = torch.randn(sum(n for n, _ in lens), num_heads + 2, head_dim, generator=generator).to(dtype)[:, :num_heads]
    metadata = AttentionMetadata.build([n for n, _ in lens], [context for _, context in lens], tables, CPU)
    return query, pool[:, 1], metadata


def reference_attention(
    query: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    window: int | None,
    soft_cap: float | None,
    bias: Tensor | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """In float32, with zeros where nothing may be read."""
    tables = metadata.block_tables.clamp(0, len(cache) - 1)
    safe = replace(metadata, block_tables=tables)
    zeroed = cache.float().nan_to_num(0)
    return reference.paged_attention(query.float(), zeroed, safe, 0.3, window, soft_cap, bias, causal, sinks, chunked)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# What a cache is stored as.
STORED: dict[str, Callable[[Tensor], Tensor]] = {"wide": torch.Tensor.contiguous, "in 8 bits": narrow_cache.narrowed}
stored_both_ways = pytest.mark.parametrize("store", STORED.values(), ids=STORED)
HEADS = [(9, 3, 64), (2, 2, 10), (8, 1, 128), (40, 1, 96), (3, 1, 33), (2, 1, 256)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), list(itertools.product([None, 7, 70], [None, 2.0])))
def test_attention_is_that_of_the_reference(
    kernels: ModuleType, heads: tuple[int, int, int], dtype: torch.dtype, window: int | None, soft_cap: float | None
) -> None:
    lens = [(1, 1), (1, 17), (1, 64), (1, 65), (5, 5), (40, 100), (64, 64), (3, 130), (1, 1100)]
    query, cache, metadata = attention_case(lens, heads, 16, dtype, window)
    found = kernels.paged_attention(query, cache, metadata, 0.3, window, soft_cap)
    close(found, reference_attention(query, cache, metadata, window, soft_cap), dtype)


@stored_both_ways
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(16, 1, 576), (3, 1, 22)], ids=str)
def test_keys_that_are_also_the_values_are_stored_once(
    kernels: ModuleType, heads: tuple[int, int, int], dtype: torch.dtype, store: Callable[[Tensor], Tensor]
) -> None:
    """Latents, as prompts and as decodes, to the bit the same in chunks of any size."""
    lens = [(1, 17), (40, 600), (1, 1100), (5, 5)]
    query, both, metadata = attention_case(lens, heads, 16, dtype)
    latents = both[:, :1]
    kept = store(torch.zeros_like(latents))
    kernels.store_kv(*[latents.transpose(1, 2).flatten(0, 1)[:, 0]] * 2, kept, torch.arange(len(latents) * 16))
    torch.testing.assert_close(kept, store(latents), atol=0, rtol=0, equal_nan=True)
    meant = narrow_cache.widened(kept, dtype) if kept.dtype is torch.int8 else kept
    found = kernels.paged_attention(query, kept, metadata, 0.1)
    expected = kernels.paged_attention(query, meant.expand(-1, 2, -1, -1, -1).contiguous(), metadata, 0.1)
    assert torch.equal(found, expected)
    close(found, reference.paged_attention(query.float(), meant.float(), metadata, 0.1), dtype)
    start, tables = 1, metadata.block_tables[1:2]
    for stop in (561, 567, 600):
        chunk = AttentionMetadata.build([stop - 560], [stop], tables, CPU)
        part = kernels.paged_attention(query[start : start + stop - 560], kept, chunk, 0.1)
        assert torch.equal(part, found[start : start + stop - 560])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_blocks_may_have_any_size(kernels: ModuleType, block_size: int, dtype: torch.dtype) -> None:
    query, cache, metadata = attention_case([(1, 70), (9, 33)], (4, 2, 64), block_size, dtype)
    close(
        kernels.paged_attention(query, cache, metadata, 0.3),
        reference_attention(query, cache, metadata, None, None),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_context_is_split_and_merged(kernels: ModuleType, dtype: torch.dtype) -> None:
    query, cache, metadata = attention_case([(1, 8192), (1, 512), (1, 513), (2, 1030)], (2, 1, 64), 16, dtype)
    close(
        kernels.paged_attention(query, cache, metadata, 0.3),
        reference_attention(query, cache, metadata, None, None),
        dtype,
    )


def test_a_step_without_sequences_is_nothing(kernels: ModuleType) -> None:
    query, cache, metadata = attention_case([], (4, 2, 64), 16, torch.bfloat16)
    assert kernels.paged_attention(query, cache, metadata, 0.3).shape == (0, 4, 64)


@stored_both_ways
@pytest.mark.parametrize("part", [slice(None), 0, 1], ids=["keys_and_values", "keys", "values"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_poisoned_sequence_spoils_no_other(
    kernels: ModuleType, dtype: torch.dtype, part: int | slice, store: Callable[[Tensor], Tensor]
) -> None:
    query, cache, metadata = attention_case([(1, 70), (1, 600), (9, 33)], (4, 2, 64), 16, dtype)
    clean = kernels.paged_attention(query, store(cache), metadata, 0.3)
    cache[metadata.block_tables[1, 2], part] = NAN
    poisoned = kernels.paged_attention(query, store(cache), metadata, 0.3)
    assert poisoned[1].isnan().all()
    assert torch.equal(poisoned[[0, *range(2, 11)]], clean[[0, *range(2, 11)]])


@stored_both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_is_not_finite_is_seen_also_where_its_weight_is_0(
    kernels: ModuleType, dtype: torch.dtype, store: Callable[[Tensor], Tensor]
) -> None:
    query, cache, metadata = attention_case([(1, 70), (1, 70)], (4, 2, 64), 16, dtype)
    query[:] = 1
    cache[metadata.block_tables[0, 0], 0, 3] = -100
    cache[metadata.block_tables[0, 0], 1, 3] = float("inf")
    found = kernels.paged_attention(query, store(cache), metadata, 0.3)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


@stored_both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_that_is_not_finite_spoils_its_own_row_alone(
    kernels: ModuleType, dtype: torch.dtype, store: Callable[[Tensor], Tensor]
) -> None:
    query, cache, metadata = attention_case([(9, 133)], (4, 2, 64), 16, dtype)
    clean = kernels.paged_attention(query, store(cache), metadata, 0.3)
    query[2, 1, 5], query[4, 3, 0], query[8, 0, 63] = NAN, float("inf"), -float("inf")
    found = kernels.paged_attention(query, store(cache), metadata, 0.3)
    spoiled = torch.zeros(9, 4, dtype=torch.bool)
    spoiled[[2, 4, 8], [1, 3, 0]] = True
    assert found[spoiled].isnan().all()
    assert torch.equal(found[~spoiled], clean[~spoiled])


@stored_both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_neighbours_nor_threads_change_a_bit(
    kernels: ModuleType, dtype: torch.dtype, store: Callable[[Tensor], Tensor]
) -> None:
    lens = [(1, 70), (1, 600), (40, 133), (1, 1500)]
    query, cache, metadata = attention_case(lens, (6, 2, 64), 16, dtype)
    cache = store(cache)
    together = kernels.paged_attention(query, cache, metadata, 0.3)
    with threads(3):
        assert torch.equal(kernels.paged_attention(query, cache, metadata, 0.3), together)
    starts = metadata.query_start.tolist()
    for row, (query_len, context) in enumerate(lens):
        alone = AttentionMetadata.build([query_len], [context], metadata.block_tables[row : row + 1], CPU)
        found = kernels.paged_attention(query[starts[row] : starts[row + 1]], cache, alone, 0.3)
        assert torch.equal(found, together[starts[row] : starts[row + 1]])


@stored_both_ways
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "soft_cap", "sinks", "chunked"),
    [
        (None, None, None, False),
        (None, 2.0, None, False),
        (70, None, None, False),
        (700, None, torch.linspace(-2, 6, 6), False),
        (700, None, None, True),
    ],
)
def test_the_tokens_that_are_computed_with_one_do_not_change_a_bit_of_it(
    kernels: ModuleType,
    dtype: torch.dtype,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    chunked: bool,
    store: Callable[[Tensor], Tensor],
) -> None:
    """One by one, as decodes; in chunks of any size, as prompts and as guesses; across ends of tiles and parts."""
    length = 1100
    query, cache, metadata = attention_case([(length, length)], (6, 2, 64), 16, dtype, window)
    cache = store(cache)
    options = (window, soft_cap, None, True, sinks, chunked)
    whole = kernels.paged_attention(query, cache, metadata, 0.3, *options)
    for size in (1, 2, 5, 9, 64, 500):
        for start in (0, 500, 505, 1020, 1070):
            stop = min(start + size, length)
            tables = metadata.block_tables.clone()
            if window is not None:
                first = start // window * window if chunked else max(0, start - window + 1)
                tables[0, : first // 16] = -1  # given back: must not be looked at
            chunk = AttentionMetadata.build([stop - start], [stop], tables, CPU)
            for count in (1, 3):  # with several, a few tokens of one sequence are split over their keys
                with threads(count):
                    found = kernels.paged_attention(query[start:stop], cache, chunk, 0.3, *options)
                assert torch.equal(found, whole[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 70, 512])
def test_tokens_attend_to_their_own_chunk(kernels: ModuleType, dtype: torch.dtype, size: int) -> None:
    lens = [(1, 1), (1, 65), (40, 100), (3, 142), (1, 1030), (90, 600)]
    query, cache, metadata = attention_case(lens, (6, 2, 64), 16, dtype, size, chunked=True)
    found = kernels.paged_attention(query, cache, metadata, 0.3, size, chunked=True)
    close(found, reference_attention(query, cache, metadata, size, None, chunked=True), dtype)


@stored_both_ways
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70])
def test_tokens_of_an_image_attend_to_later_tokens_of_it(
    kernels: ModuleType, dtype: torch.dtype, window: int | None, store: Callable[[Tensor], Tensor]
) -> None:
    """Across tiles and parts, beside decodes that share blocks, and in chunks that begin inside an image."""
    lens = [(1, 1), (1, 600), (700, 700), (70, 700), (1, 600), (3, 3)]
    query, cache, metadata = attention_case(lens, (6, 2, 64), 16, dtype, window)
    metadata.block_tables[4] = metadata.block_tables[1]
    metadata = with_images(metadata, [(2, 3, 40), (2, 41, 300), (2, 500, 700), (3, 610, 690), (5, 0, 3)])
    cache = store(cache)
    wide = narrow_cache.widened(cache, torch.float32) if store is narrow_cache.narrowed else cache
    for soft_cap in (None, 2.0):
        found = kernels.paged_attention(query, cache, metadata, 0.3, window, soft_cap)
        close(found, reference_attention(query, wide, metadata, window, soft_cap), dtype)
    for start in (41, 130, 555):
        chunk = AttentionMetadata.build([700 - start], [700], metadata.block_tables[2:3], CPU)
        chunk = with_images(chunk, [(0, 3, 40), (0, 41, 300), (0, 500, 700)])
        later = kernels.paged_attention(query[start + 2 : 702], cache, chunk, 0.3, window, 2.0)
        assert torch.equal(later, found[start + 2 : 702])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_take_part_in_the_softmax(kernels: ModuleType, dtype: torch.dtype) -> None:
    lens = [(1, 1), (1, 65), (40, 100), (3, 130), (1, 1030), (7, 600)]
    sinks = torch.tensor([-30.0, -1.0, 0.0, 2.0, 9.0, 90.0])
    for window in (None, 70):
        query, cache, metadata = attention_case(lens, (6, 2, 64), 16, dtype, window)
        found = kernels.paged_attention(query, cache, metadata, 0.3, window, None, None, True, sinks)
        close(found, reference_attention(query, cache, metadata, window, None, sinks=sinks), dtype)


ODD_HEADS = [((9, 3, 64), 16), ((2, 2, 5), 1), ((40, 1, 80), 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "block_size"), ODD_HEADS, ids=str)
def test_a_bias_is_added_by_distance(
    kernels: ModuleType, heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    lens = [(1, 1), (1, 65), (40, 100), (3, 130), (1, 1030), (7, 600)]
    for window in (None, 70):
        query, cache, metadata = attention_case(lens, heads, block_size, dtype, window)
        for num_distances in (1, 33, 128, 1200):
            bias = torch.randn(heads[0], num_distances, generator=generator) * 2
            found = kernels.paged_attention(query, cache, metadata, 0.3, window, None, bias)
            close(found, reference_attention(query, cache, metadata, window, None, bias), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "block_size"), ODD_HEADS, ids=str)
def test_queries_that_see_a_whole_context_may_be_more_than_its_tokens(
    kernels: ModuleType, heads: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> None:
    lens = [(1, 1), (1, 65), (40, 7), (3, 130), (1, 1030), (35, 600)]
    query, cache, metadata = attention_case(lens, heads, block_size, dtype)
    for soft_cap in (None, 2.0):
        found = kernels.paged_attention(query, cache, metadata, 0.3, None, soft_cap, None, False)
        close(found, reference_attention(query, cache, metadata, None, soft_cap, None, False), dtype)


@stored_both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_distances", [None, 1, 77, 1000], ids=lambda n: f"bias{n}" if n else "not_causal")
def test_neither_a_bias_nor_a_whole_context_lets_other_rows_change_a_bit(
    kernels: ModuleType,
    num_distances: int | None,
    dtype: torch.dtype,
    store: Callable[[Tensor], Tensor],
    generator: torch.Generator,
) -> None:
    """Alone, as decodes, and in chunks, which begin anywhere in tiles and parts."""
    lens = [(1, 40), (620, 620), (9, 133)]
    query, cache, metadata = attention_case(lens, (6, 2, 64), 16, dtype)
    cache = store(cache)
    bias = None if num_distances is None else torch.randn(6, num_distances, generator=generator)
    together = kernels.paged_attention(query, cache, metadata, 0.3, None, None, bias, bias is not None)
    for row, (query_len, context) in enumerate(lens):
        first = sum(n for n, _ in lens[:row])
        for start, stop in ((0, 1), (0, query_len), (3, 8), (500, 505), (507, 600), (619, 620)):
            if stop > query_len:
                continue
            length = context if bias is None else context - query_len + stop
            part = AttentionMetadata.build([stop - start], [length], metadata.block_tables[row : row + 1], CPU)
            rows = slice(first + start, first + stop)
            for count in (1, 3):
                with threads(count):
                    found = kernels.paged_attention(query[rows], cache, part, 0.3, None, None, bias, bias is not None)
                assert torch.equal(found, together[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (5, 123), (33, 576), (4, 3, 10)])
def test_rms_norm(kernels: ModuleType, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> None:
    x = torch.randn(shape[0], *shape[1:-1], shape[-1] + 3, generator=generator).to(dtype)[..., : shape[-1]]
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    for offset in (0.0, 1.0):
        close(kernels.rms_norm(x, weight, 1e-5, offset), reference.rms_norm(x, weight, 1e-5, offset), dtype)
        wide = kernels.rms_norm(x.float(), weight, 1e-5, offset, torch.float32)
        close(wide, reference.rms_norm(x, weight, 1e-5, offset, torch.float32), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (5, 123), (33, 576)])
def test_add_rms_norm(
    kernels: ModuleType, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, residual = torch.randn(2, *shape, generator=generator)
    weight = torch.randn(shape[1], generator=generator).to(dtype)
    for delta in (x, x.to(dtype)):
        expected_residual = residual.clone()
        expected = reference.add_rms_norm(delta, expected_residual, weight, 1e-5, 1.0)
        found = kernels.add_rms_norm(delta, residual, weight, 1e-5, 1.0)
        assert found.dtype is dtype
        close(found, expected, dtype)
        assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "pairs"), [(0, 2, 8, 4), (1, 9, 64, 32), (7, 3, 10, 5), (300, 2, 80, 16)]
)
def test_rotary_embedding(
    kernels: ModuleType,
    tokens: int,
    heads: int,
    head_dim: int,
    pairs: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    fused = torch.randn(tokens, heads + 1, head_dim, generator=generator).to(dtype)
    expected = fused.clone()
    tables = rotary_tables(torch.arange(tokens) * 17, 100.0 ** -torch.linspace(0, 1, pairs), 1.25)
    reference.rotary_embedding(expected[:, :heads], *tables)
    kernels.rotary_embedding(fused[:, :heads], *tables)
    close(fused, expected, dtype)
    assert torch.equal(fused[:, heads], expected[:, heads])


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv_writes_its_slots_and_nothing_else(
    kernels: ModuleType, dtype: torch.dtype, generator: torch.Generator
) -> None:
    pool = torch.zeros(6, 2, 2, 4, 3, 5, dtype=dtype)
    expected = pool.clone()
    keys, values = torch.randn(2, 3, 4, 5, generator=generator).to(dtype)[:, :, :3]
    reference.store_kv(keys, values, expected[:, 1], torch.tensor([23, 0, 9]))
    kernels.store_kv(keys, values, pool[:, 1], torch.tensor([23, 0, 9]))
    assert torch.equal(pool, expected)
    kernels.store_kv(keys, values, pool[:, 1], torch.tensor([-1, -1, -1]))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("normed", "pairs", "chunked"),
    [(False, 32, False), (True, 16, True), (True, None, False), (False, None, True)],
)
def test_a_fused_projection_attends_as_its_parts_do(
    kernels: ModuleType, normed: bool, pairs: int | None, chunked: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    _, cache, metadata = attention_case([(1, 40), (9, 33), (1, 1)], (4, 2, 64), 16, dtype)
    qkv = torch.randn(11, 8 * 64, generator=generator).to(dtype)
    tables = metadata.block_tables
    slots = [
        int(tables[0, 2]) * 16 + 7,
        *(int(tables[1, p // 16]) * 16 + p % 16 for p in range(24, 33)),
        int(tables[2, 0]) * 16,
    ]
    norms = tuple(torch.randn(2, 64, generator=generator).to(dtype)) if normed else None
    rotation = None
    if pairs is not None:
        rotation = rotary_tables(torch.arange(11) * 17, 100.0 ** -torch.linspace(0, 1, pairs), 1.25)
    arguments = (torch.tensor(slots), metadata, 0.3, 20, None, torch.randn(4, generator=generator), chunked)
    expected_cache = cache.clone()
    expected = reference.qkv_attention(qkv.clone(), norms, 1e-5, 1.0, rotation, expected_cache, *arguments)
    close(kernels.qkv_attention(qkv, norms, 1e-5, 1.0, rotation, cache, *arguments), expected, dtype)
    assert torch.equal(cache.isnan(), expected_cache.isnan())
    close(cache.nan_to_num(0), expected_cache.nan_to_num(0), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_8_bits_are_stored_as_those_of_the_reference(
    kernels: ModuleType, dtype: torch.dtype, generator: torch.Generator
) -> None:
    for head_dim in (64, 33, 128):
        keys, values = (torch.randn(2, 9, 3, head_dim, generator=generator) * 3).to(dtype)
        keys[0] = 0
        keys[1, 0, 5], keys[1, 1, 32], values[2, 2, 0] = NAN, float("inf"), -float("inf")
        values[3] = torch.finfo(dtype).tiny
        pool = torch.full((4, 5, 2, 4, 3, head_dim + 4), 77, dtype=torch.int8)
        expected = pool.clone()
        slots = torch.tensor([3, 15, 0, 7, 8, 2, 9, 1, 12])
        kernels.store_kv(keys, values, pool[:, 1], slots)
        reference.store_kv(keys, values, expected[:, 1], slots)
        assert torch.equal(pool, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (70, None), (None, 2.0)])
def test_attention_to_a_cache_in_8_bits_is_that_to_the_numbers_that_it_means(
    kernels: ModuleType, heads: tuple[int, int, int], window: int | None, soft_cap: float | None, dtype: torch.dtype
) -> None:
    """To the bit, or nearer to them than bf16 is, and nothing that a sequence does not own is read."""
    query, cache, metadata = attention_case([(1, 40), (5, 700), (1, 1), (70, 150)], heads, 16, dtype, window)
    stored = narrow_cache.narrowed(cache)
    meant = narrow_cache.widened(stored, dtype)
    assert torch.equal(meant.isnan(), cache.isnan())
    found, wide = (kernels.paged_attention(query, each, metadata, 0.3, window, soft_cap) for each in (stored, meant))
    assert wide.isfinite().all()
    if dtype is torch.bfloat16 and heads[2] % 64 == 0:
        exact = narrow_cache.widened(stored, torch.float32)
        expected = reference_attention(query, exact, metadata, window, soft_cap)
        assert torch.equal(found, wide) or (found - expected).norm() < 0.7 * (wide - expected).norm()
    else:
        assert torch.equal(found, wide)


@pytest.mark.parametrize("scale", [0.125, 1.0])
@pytest.mark.parametrize("case", ["like_any", "sink_without_a_value", "large_query", "large_key_and_value", "small"])
def test_attention_to_8_bits_in_bf16_is_as_near_as_that_to_wide_numbers(
    kernels: ModuleType, case: str, scale: float, generator: torch.Generator
) -> None:
    """Whatever is large beside the rest."""
    query = torch.randn(20, 4, 64, generator=generator)
    keys, values = torch.randn(2, 800, 2, 64, generator=generator)
    if case == "sink_without_a_value":
        query += 1
        keys[0], values[0] = 1.2 * 0.125 / scale, values[0] * 0.01
    elif case == "large_query":
        query[..., 3] *= 50
        keys[..., 3] *= 0.02
    elif case == "large_key_and_value":
        keys[..., 3] += 20
        values[..., 5] *= 30
    elif case == "small":
        query, keys, values = query * 1e12, keys * 1e-12, values * 1e-12
    cache = torch.stack((keys, values)).view(2, 50, 16, 2, 64).transpose(0, 1).to(torch.bfloat16)
    stored = narrow_cache.narrowed(cache)
    metadata = AttentionMetadata.build([20], [800], torch.arange(50)[None], CPU)
    query = query.to(torch.bfloat16)
    expected = reference.paged_attention(
        query.double(), narrow_cache.widened(stored, torch.float64), metadata, scale, None, None
    )
    found, wide = (
        (kernels.paged_attention(query, each, metadata, scale) - expected).norm()
        for each in (stored, narrow_cache.widened(stored, torch.bfloat16))
    )
    assert found <= wide
    assert found < 0.01 * expected.norm()


def test_heads_of_zeros_in_8_bits_are_the_mean_of_their_values(kernels: ModuleType, generator: torch.Generator) -> None:
    query = torch.randn(3, 4, 64, generator=generator).to(torch.bfloat16)
    query[2] = 0
    cache = torch.zeros(2, 2, 16, 2, 64)
    cache[:, 1] = torch.randn(2, 16, 2, 64, generator=generator)
    metadata = AttentionMetadata.build([1, 1, 1], [32, 32, 32], torch.tensor([[0, 1]] * 3), CPU)
    found = kernels.paged_attention(query, narrow_cache.narrowed(cache), metadata, 0.3)
    mean = cache[:, 1].flatten(0, 1).mean(0).repeat_interleave(2, 0)
    torch.testing.assert_close(found.float(), mean.expand(3, 4, 64), atol=1e-2, rtol=1e-2)
    cache[:, 1] = 0
    assert torch.equal(
        kernels.paged_attention(query, narrow_cache.narrowed(cache), metadata, 0.3), torch.zeros_like(query)
    )


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_blocks_in_8_bits_may_have_any_size(kernels: ModuleType, block_size: int) -> None:
    query, cache, metadata = attention_case([(1, 70), (9, 33), (1, 600)], (8, 1, 64), block_size, torch.bfloat16)
    meant = narrow_cache.widened(narrow_cache.narrowed(cache), torch.float32)
    found = kernels.paged_attention(query, narrow_cache.narrowed(cache), metadata, 0.3)
    close(found, reference_attention(query, meant, metadata, None, None), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fused_projection_stores_in_8_bits_what_it_would_have_stored(
    kernels: ModuleType, dtype: torch.dtype, generator: torch.Generator
) -> None:
    _, cache, metadata = attention_case([(1, 40), (9, 33)], (4, 2, 64), 16, dtype)
    cache = cache.contiguous()
    tables = metadata.block_tables
    slots = torch.tensor([int(tables[0, 2]) * 16 + 7, *(int(tables[1, p // 16]) * 16 + p % 16 for p in range(24, 33))])
    qkv, norms = torch.randn(10, 8 * 64, generator=generator).to(dtype), tuple(torch.ones(2, 64, dtype=dtype))
    rotation = rotary_tables(torch.arange(10) * 17, 100.0 ** -torch.linspace(0, 1, 16), 1.25)
    stored = narrow_cache.narrowed(cache)
    sinks = torch.tensor([-2.0, 0.0, 1.5, 9.0])
    arguments = (slots, metadata, 0.3, None, None, sinks)
    found = kernels.qkv_attention(qkv.clone(), norms, 1e-5, 1.0, rotation, stored, *arguments)
    kernels.qkv_attention(qkv.clone(), norms, 1e-5, 1.0, rotation, cache, *arguments)
    assert torch.equal(stored, narrow_cache.narrowed(cache))
    # A prepared query attends to what was stored.
    heads = qkv.clone().view(10, 8, 64)
    query = kernels.rms_norm(heads[:, :4], norms[0], 1e-5, 1.0, torch.float32)
    kernels.rotary_embedding(query, *rotation)
    meant = narrow_cache.widened(stored, dtype)
    expected = kernels.paged_attention(query.to(dtype), meant, metadata, 0.3, sinks=sinks)
    close(found.view(10, 4, 64), expected, dtype)


def lora_case(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, LoraWeights]:
    """Inputs that lie apart, a slot for each row, and adapters of ranks 3, 0, 8 and 1 for three fused projections."""
    inputs, starts = 77, (0, 40, 61, 100)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    ranks = torch.tensor([3, 0, 8, 1], dtype=torch.int32)
    weights = LoraWeights(randn(4, 3, 8, inputs) * 0.1, randn(4, 8, starts[-1]), ranks, starts)
    slots = torch.tensor([2, -1, 0, 0, 1, 3, -1, 2, 3], dtype=torch.int32)
    return randn(len(slots), 2 * inputs)[:, :inputs], slots, weights


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_add_what_those_of_the_reference_add(
    kernels: ModuleType, dtype: torch.dtype, wide: bool, generator: torch.Generator
) -> None:
    x, slots, weights = lora_case(dtype, generator)
    found = torch.randn(len(x), 100, generator=generator).to(torch.float32 if wide else dtype)
    expected, before = found.float(), found.clone()
    kernels.add_lora(found, x, slots, weights)
    reference.add_lora(expected, x, slots, weights)
    close(found, expected, dtype)
    assert torch.equal(found[[1, 4, 6]], before[[1, 4, 6]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_an_adapter_adds_does_not_depend_on_other_rows(
    kernels: ModuleType, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, slots, weights = lora_case(dtype, generator)
    together = torch.zeros(len(x), 100)
    kernels.add_lora(together, x, slots, weights)
    for row in range(len(x)):
        alone = torch.zeros(1, 100)
        kernels.add_lora(alone, x[row : row + 1], slots[row : row + 1], weights)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [*reference.ACTIVATIONS, ClampedSwiglu(1.7, 2.5)])
def test_gated_activation(
    kernels: ModuleType, activation: Activation, dtype: torch.dtype, generator: torch.Generator
) -> None:
    for shape in ((0, 8), (1, 2), (5, 246), (40, 3072)):
        x = (torch.randn(shape, generator=generator) * 4).to(dtype)
        expected = reference.gated_activation(x.float(), activation)
        close(kernels.gated_activation(x, activation), expected, dtype)


def test_what_does_not_fit_is_refused(kernels: ModuleType) -> None:
    query, cache, metadata = attention_case([(1, 5)], (4, 2, 64), 16, torch.float32)
    with pytest.raises(RuntimeError, match="do not fit"):
        kernels.paged_attention(query[:, :3], cache, metadata, 0.3)
    with pytest.raises(RuntimeError, match="must be on the CPU and"):
        kernels.paged_attention(query.half(), cache, metadata, 0.3)
    narrow = narrow_cache.narrowed(cache)
    with pytest.raises(RuntimeError, match="do not fit"):
        kernels.paged_attention(query[:, :, :60].contiguous(), narrow, metadata, 0.3)
    with pytest.raises(RuntimeError, match="a cache in 8 bits is for the CPU"):
        kernels.paged_attention(query.to("meta"), narrow, metadata, 0.3)
    with pytest.raises(ValueError, match="must be contiguous float32"):
        kernels.paged_attention(query, cache, metadata, 0.3, None, None, torch.zeros(3, 1))
    for end in (3, 5):
        image = replace(metadata, visible_ends=torch.tensor([end], dtype=torch.int32))
        with pytest.raises(RuntimeError, match=f"row 0 of the query cannot end at position {end}"):
            kernels.paged_attention(query, cache, image, 0.3)
    empty = AttentionMetadata.build([1], [0], metadata.block_tables, CPU)
    with pytest.raises(RuntimeError, match="has 1 query tokens of 0"):
        kernels.paged_attention(query, cache, empty, 0.3, causal=False)
    with pytest.raises(RuntimeError, match="does not go with one of"):
        kernels.rms_norm(torch.zeros(2, 2).half(), torch.zeros(2), 1e-5)
    with pytest.raises(RuntimeError, match="residual must be on the CPU and Float"):
        kernels.add_rms_norm(torch.zeros(2, 2).half(), torch.zeros(2, 2).half(), torch.zeros(2).half(), 1e-5)
    with pytest.raises(RuntimeError, match="not Long"):
        kernels.rms_norm(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 1e-5)
