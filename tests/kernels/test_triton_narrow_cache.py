"""Triton's kernels over a cache in 8 bits, against eager torch.

The interpreter rounds e4m3 towards zero and has no NaN in it: there heads are drawn whose numbers e4m3 has exactly.
"""

import pytest
import torch
from torch import Tensor
from triton_helpers import DEVICE, INTERPRETED, quiet_interpreter, randn, strict

from kernels import composed, reference, triton
from kernels.attention.narrow_cache import narrowed, stored_size, widened
from kernels.float8 import FLOAT8
from kernels.inputs import AttentionMetadata, rotary_tables

ops = strict(triton)
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter rounds e4m3 wrongly: it needs a GPU")
if not INTERPRETED and torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("this GPU has no e4m3", allow_module_level=True)
CACHE_TYPES = [pytest.param(torch.int8, id="int8"), pytest.param(FLOAT8, id="e4m3")]
DTYPES = [torch.float32, torch.float16]


def heads_of(cache_dtype: torch.dtype, *shape: int, seed: int = 0, exact: bool = INTERPRETED) -> Tensor:
    """Random heads in float32, of numbers that this type has times a power of two if `exact`."""
    if cache_dtype is torch.int8 or not exact:
        return 3 * randn(*shape, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    numbers = (randn(*shape, seed=seed).cpu() * 20).to(FLOAT8).float()
    numbers[numbers.abs() < 2**-6] = 0  # no subnormal number, which the interpreter flushes
    numbers[..., 0] = 448
    powers = torch.randint(-7, -3, shape[:-1], generator=draw)
    return (numbers * 2.0 ** powers[..., None]).to(DEVICE)


def empty_cache(cache_dtype: torch.dtype, blocks: int, block_size: int, heads: int, head_dim: int) -> Tensor:
    """One layer of three, whose bytes are all 77."""
    shape = (blocks, 3, 2, block_size, heads, stored_size(head_dim, cache_dtype))
    return torch.full(shape, 77, dtype=torch.int8, device=DEVICE).view(cache_dtype)[:, 1]


def assert_same_bytes(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.contiguous().view(torch.int8), expected.contiguous().view(torch.int8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", CACHE_TYPES)
@pytest.mark.parametrize(("block_size", "heads", "head_dim"), [(4, 3, 12), (3, 1, 4), (16, 2, 64)])
def test_heads_are_stored_as_the_reference_stores_them(
    block_size: int, heads: int, head_dim: int, cache_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    found = empty_cache(cache_dtype, 7, block_size, heads, head_dim)
    expected = found.clone()
    keys, values = (heads_of(cache_dtype, 5, heads, head_dim, seed=seed).to(dtype) for seed in (1, 2))
    values[1, 0] = 0
    slots = torch.tensor([6 * block_size, 0, 6 * block_size - 1, -1, 2 * block_size], device=DEVICE)
    ops.store_kv(keys, values, found, slots)
    kept = slots >= 0
    reference.store_kv(keys[kept], values[kept], expected, slots[kept])
    assert_same_bytes(found, expected)


@quiet_interpreter
@pytest.mark.parametrize("cache_dtype", [CACHE_TYPES[0], pytest.param(FLOAT8, id="e4m3", marks=needs_gpu)])
def test_a_head_that_is_not_finite_is_nan_when_it_is_read(cache_dtype: torch.dtype) -> None:
    keys = heads_of(cache_dtype, 3, 1, 8)
    keys[0, 0, 3], keys[1, 0, 0] = torch.nan, -torch.inf
    found = empty_cache(cache_dtype, 1, 4, 1, 8)
    ops.store_kv(keys, keys, found, torch.arange(3, device=DEVICE))
    for part in (0, 1):
        read = widened(found[0, part, :3], torch.float32)
        assert read[:2].isnan().all()
        assert read[2].isfinite().all()


@pytest.mark.parametrize("cache_dtype", CACHE_TYPES)
def test_huge_and_tiny_heads_keep_their_size(cache_dtype: torch.dtype) -> None:
    keys = heads_of(cache_dtype, 2, 1, 8) * torch.tensor([2.0**110, 2.0**-90], device=DEVICE)[:, None, None]
    found, expected = (empty_cache(cache_dtype, 1, 4, 1, 8) for _ in range(2))
    for backend, cache in ((ops, found), (reference, expected)):
        backend.store_kv(keys, keys, cache, torch.arange(2, device=DEVICE))
    assert_same_bytes(found, expected)
    torch.testing.assert_close(widened(found[0, 0, :2], torch.float32), keys, rtol=0.07, atol=2.0**-85)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", CACHE_TYPES)
@pytest.mark.parametrize(
    ("kv_heads", "groups", "head_dim", "block_size", "window"),
    [(2, 2, 16, 16, None), (1, 7, 80, 3, 9), (3, 1, 4, 16, None)],
)
def test_it_is_attended_to_as_what_it_means(
    kv_heads: int,
    groups: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    lens = [(1, 0), (1, 62), (1, 200), (17, 0), (5, 70)]
    context_lens = [sum(pair) for pair in lens]
    owned = [-(-context_len // block_size) for context_len in context_lens]
    tables = torch.full((len(lens), max(owned)), 999)
    cache = empty_cache(cache_dtype, sum(owned), block_size, kv_heads, head_dim)
    order = torch.randperm(sum(owned), generator=torch.Generator().manual_seed(1))
    for row, (blocks, context_len) in enumerate(zip(order.split(owned), context_lens, strict=True)):
        tables[row, : len(blocks)] = blocks
        positions = torch.arange(context_len)
        slots = (blocks[positions // block_size] * block_size + positions % block_size).to(DEVICE)
        keys, values = (heads_of(cache_dtype, context_len, kv_heads, head_dim, seed=9 * row + n) for n in (0, 1))
        reference.store_kv(keys, values, cache, slots)
    metadata = AttentionMetadata.build([query_len for query_len, _ in lens], context_lens, tables, DEVICE)
    query = randn(metadata.query_start.tolist()[-1], kv_heads * groups, head_dim, dtype=dtype, seed=5)
    found = ops.paged_attention(query, cache, metadata, head_dim**-0.5, window)
    meant = widened(cache, dtype)
    torch.testing.assert_close(
        found, ops.paged_attention(query, meant, metadata, head_dim**-0.5, window), rtol=0, atol=0
    )
    exact = reference.paged_attention(query.float(), cache, metadata, head_dim**-0.5, window).to(dtype)
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("cache_dtype", CACHE_TYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (16, 12), (64, 0)])
@pytest.mark.parametrize("normalised", [False, True])
def test_a_fused_projection_is_stored_in_8_bits(
    normalised: bool, head_dim: int, rotary_dim: int, cache_dtype: torch.dtype
) -> None:
    if INTERPRETED and cache_dtype is FLOAT8 and (normalised or rotary_dim):
        pytest.skip("Triton's interpreter rounds e4m3 wrongly: it needs a GPU")
    heads, kv_heads, block_size = 6, 2, 3
    metadata = AttentionMetadata.build([2, 1], [8, 1], torch.tensor([[4, 1, 6], [0, 0, 0]]), DEVICE)
    slots, positions = torch.tensor([18, 19, 0], device=DEVICE), torch.tensor([6, 7, 0], device=DEVICE)
    cache = empty_cache(cache_dtype, 7, block_size, kv_heads, head_dim)
    filled = heads_of(cache_dtype, 21, kv_heads, head_dim, seed=7)
    reference.store_kv(filled, filled, cache, torch.arange(21, device=DEVICE))
    qkv = heads_of(cache_dtype, 3, heads + 2 * kv_heads, head_dim, seed=3).flatten(1)
    norms = (randn(head_dim, seed=1), randn(head_dim, seed=2)) if normalised else None
    rotation = None
    if rotary_dim:
        frequencies = 100.0 ** -(torch.arange(rotary_dim // 2, device=DEVICE) * 2 / rotary_dim)
        rotation = rotary_tables(positions, frequencies, 1.5)
    found, expected = cache.clone(), cache.clone()
    arguments = (norms, 1e-5, 1.0, rotation)
    attended = ops.qkv_attention(qkv.clone(), *arguments, found, slots, metadata, head_dim**-0.5)
    again = composed.qkv_attention(reference, qkv.clone(), *arguments, expected, slots, metadata, head_dim**-0.5)
    # Norms are summed up in another order, and a number in the middle of two may go to either.
    step = 0.01 if cache_dtype is torch.int8 else 0.15
    torch.testing.assert_close(widened(found, torch.float32), widened(expected, torch.float32), rtol=step, atol=0.2)
    torch.testing.assert_close(attended, again, rtol=0.02, atol=0.1)
    rest = torch.ones(21, dtype=torch.bool, device=DEVICE)
    rest[slots] = False
    for part in (0, 1):
        assert_same_bytes(found[:, part].flatten(0, 1)[rest], expected[:, part].flatten(0, 1)[rest])
    if not (normalised or rotary_dim):
        assert_same_bytes(found, expected)


@pytest.mark.parametrize("cache_dtype", CACHE_TYPES)
@pytest.mark.parametrize("num_pairs", [3, 300])
def test_blocks_are_copied_byte_by_byte(num_pairs: int, cache_dtype: torch.dtype) -> None:
    found = torch.arange(320 * 3 * 41, device=DEVICE).to(torch.int8).view(320, 3, 41).view(cache_dtype)
    expected = found.clone()
    destinations = torch.randperm(320, generator=torch.Generator().manual_seed(2))[:num_pairs].to(DEVICE)
    sources = destinations.roll(1)
    ops.copy_blocks(found, sources, destinations)
    reference.copy_blocks(expected, sources, destinations)
    assert_same_bytes(found, expected)
    assert_same_bytes(found[destinations[1]], torch.arange(320 * 3 * 41, device=DEVICE).to(torch.int8).view(320, 3, 41)[
        sources[1]
    ])  # fmt: skip


def test_heads_whose_scales_would_lie_between_words_are_refused() -> None:
    keys = torch.ones(1, 1, 10, device=DEVICE)
    with pytest.raises(ValueError, match="heads of 10 numbers cannot be kept in 8 bits on a GPU"):
        ops.store_kv(keys, keys, empty_cache(torch.int8, 1, 4, 1, 10), torch.tensor([0], device=DEVICE))


@needs_gpu
def test_numbers_are_rounded_to_the_nearest_of_e4m3() -> None:
    keys = heads_of(FLOAT8, 64, 8, 128, exact=False)
    found = empty_cache(FLOAT8, 4, 16, 8, 128)
    ops.store_kv(keys, -keys, found, torch.arange(64, device=DEVICE))
    assert_same_bytes(found[:, 0].flatten(0, 1), narrowed(keys, FLOAT8))
    assert_same_bytes(found[:, 1].flatten(0, 1), narrowed(-keys, FLOAT8))
