"""Paged attention as a Triton kernel against eager torch in float32; every unused slot is poisoned."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from attention_cases import CHUNKS, EDGES, NAN, make_case, ops
from image_metadata import with_images
from prefix_in_flight import check_prefix_in_flight
from torch import Tensor
from triton_helpers import DEVICE, DTYPES, FEW_DTYPES, HALF, INTERPRETED, quiet_interpreter, randn, strict

from kernels import reference, triton
from kernels.inputs import rotary_tables
from kernels.triton import invariant


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", [EDGES[:1], EDGES, [*CHUNKS, *EDGES], [(2, 70), (3, 0)]])
def test_decodes_and_chunks(lens: list[tuple[int, int]], dtype: torch.dtype) -> None:
    make_case(lens, dtype=dtype).check()


@pytest.mark.parametrize(
    ("kv_heads", "groups", "head_dim"),
    [(1, 1, 16), (3, 1, 2), (1, 7, 10), (2, 3, 64), (1, 17, 80), (1, 4, 128), (1, 2, 256)],
)
def test_heads_of_any_number_and_size(kv_heads: int, groups: int, head_dim: int) -> None:
    make_case([(1, 20), (19, 0), (9, 65)], kv_heads=kv_heads, groups=groups, head_dim=head_dim).check()
    make_case([(1, 20), (1, 70)], kv_heads=kv_heads, groups=groups, head_dim=head_dim).check()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", [80, 128, 256])
def test_large_heads_in_half_precision(head_dim: int, dtype: torch.dtype) -> None:
    make_case([(1, 40), (19, 20)], kv_heads=1, head_dim=head_dim, dtype=dtype).check()


@pytest.mark.parametrize("block_size", [1, 3, 4, 64, 256])
def test_blocks_of_any_size(block_size: int) -> None:
    make_case([(1, 2), (1, 3), (9, 3), (1, 260), (40, 230)], block_size=block_size).check()


@pytest.mark.parametrize("window", [1, 64, 65, 1000])
def test_a_window_ends_anywhere(window: int) -> None:
    make_case([(70, 3), (5, 100), (1, 64), (1, 200)], kv_heads=1).check(window)
    make_case([(1, 700), (1, 3)], kv_heads=1).check(window)


@pytest.mark.parametrize("size", [1, 48, 64])
def test_a_chunk_begins_anywhere(size: int) -> None:
    make_case([(70, 3), (5, 94), (1, 64), (1, 200)], kv_heads=1).check(size, chunked=True)
    make_case([(1, 700), (1, 3)], kv_heads=1).check(size, chunked=True)


def test_what_left_the_window_may_be_anything() -> None:
    """Its blocks may belong to another sequence by now."""
    case = make_case([(1, 299), (1, 150)])
    window = 20
    expected = case.run(window)
    for row, context_len in enumerate([300, 151]):
        gone = case.metadata.block_tables[row, : (context_len - window) // 16]
        case.layer_cache[gone.long()] = NAN
        case.metadata.block_tables[row, : len(gone)] = len(case.layer_cache) + 99
    assert torch.equal(case.run(window), expected)


@pytest.mark.parametrize("attend", [ops.paged_attention, strict(invariant).paged_attention])
@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_tokens_of_an_image_attend_to_later_tokens_of_it(dtype: torch.dtype, attend: Callable[..., Tensor]) -> None:
    """Across tiles and parts, beside decodes, and in a chunk that begins inside an image."""
    case = make_case([(1, 5), (1, 90), (100, 495), (20, 45), (3, 0)], dtype=dtype, attend=attend)
    case.metadata = with_images(case.metadata, [(2, 497, 520), (2, 521, 590), (3, 40, 60), (4, 0, 3)])
    for window in (None, 9, 70):
        case.check(window)
    case.check(70, soft_cap=2.0)


@pytest.mark.parametrize(("head_dim", "block_size"), [(5, 1), (80, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_added_by_distance(head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    case = make_case([(12, 60), (1, 64)], block_size, 1, 3, head_dim, dtype)
    case.check(bias=randn(3, 33))
    case.check(window=30, bias=randn(3, 1))


def test_a_bias_is_added_to_each_part_of_a_long_context() -> None:
    case = make_case([(1, 520), (1, 30)], kv_heads=1, groups=7, head_dim=64)
    for num_distances in (100, 1000):
        case.check(bias=randn(7, num_distances))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lens", "head_dim", "block_size"), [
    ([(12, -10), (9, 60), (1, 64)], 5, 1), ([(1, 63), (1, 520)], 64, 16)
])  # fmt: skip
def test_queries_that_see_a_whole_context_may_be_more_than_its_tokens(
    lens: list[tuple[int, int]], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    make_case(lens, block_size, 1, 3, head_dim, dtype).check(causal=False)


def test_soft_caps() -> None:
    case = make_case([(70, 3), (5, 100), (1, 64), (1, 200)])
    case.check(soft_cap=2.0)
    case.check(window=33, soft_cap=0.5)


def test_sinks_take_part_in_the_softmax() -> None:
    case = make_case([(70, 3), (5, 100), (1, 64), (1, 200), (1, 0)])
    case.check(sinks=randn(4) * 4)
    case.check(window=33, soft_cap=0.5, sinks=randn(4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_contexts_are_split(dtype: torch.dtype) -> None:
    """8,192 keys, one past it, and beside them sequences that leave most of their splits empty.

    In the interpreter a fourth of these: it is given few processors, and so makes few parts of any context.
    """
    scale = 4 if INTERPRETED else 1
    lens = [(1, 8192 // scale - 1), (1, 8192 // scale), (1, 0), (1, 64)]
    make_case(lens, kv_heads=1, dtype=dtype).check()
    make_case(lens, kv_heads=1, dtype=dtype).check(window=3000 // scale, sinks=randn(2) * 4)


def test_short_chunks_behind_long_contexts_are_split() -> None:
    make_case([(7, 2000), (1, 1500), (1, 0), (30, 0)], kv_heads=1).check()


def test_a_long_prompt_is_not_split() -> None:
    make_case([(200, 3), (1, 700)], kv_heads=1).check()


def test_a_padding_row_becomes_zero() -> None:
    """Decodes of a captured graph: contexts at a replay may be shorter than at the capture."""
    for longest in (5000, 33):  # split, and not split
        case = make_case([(1, 32), (1, 4), (1, 0), (1, 0)])
        expected = case.run()
        case.metadata.context_lens[2:] = 0
        case.metadata.block_tables[2:] = len(case.layer_cache) + 99
        case.metadata = replace(case.metadata, max_context_len=longest)
        found = case.run()
        torch.testing.assert_close(found[:2], expected[:2])
        assert not found[2:].any()
    torch.testing.assert_close(case.run(causal=False), found)  # a sequence's last token sees all of it anyway


@quiet_interpreter
@pytest.mark.parametrize("context", [31, 1500])
def test_a_poisoned_sequence_spoils_no_other(context: int) -> None:
    case = make_case([(1, 5), (1, context), (3, 2), (3, 0)], block_size=4)
    clean = case.run()
    assert clean.isfinite().all()
    for row in (1, 3):
        case.layer_cache[case.metadata.block_tables[row, 0].long()] = NAN
    poisoned = case.run()
    assert torch.equal(poisoned[:1], clean[:1])
    assert poisoned[1].isnan().all()
    assert torch.equal(poisoned[2:5], clean[2:5])
    assert poisoned[5:].isnan().all()


def test_no_token_and_no_sequence() -> None:
    case = make_case([])
    assert case.run().shape == (0, 4, 16)


def test_sequences_without_a_query_token_are_passed_over() -> None:
    case = make_case([(0, 5), (3, 20), (0, 0), (1, 7), (0, 9)])
    case.check()


def test_a_layer_attends_from_its_fused_projection() -> None:
    """Norms, rotation, storing and attention in a row, each working where the one before left its result."""
    case = make_case([(5, 0), (1, 20), (3, 62)], kv_heads=2, groups=3, head_dim=10)
    block_size = case.layer_cache.shape[2]
    slots = torch.cat([
        case.metadata.block_tables[row, positions // block_size].long() * block_size + positions % block_size
        for row, positions in enumerate(torch.arange(*span, device=DEVICE) for span in ((0, 5), (20, 21), (62, 65)))
    ])  # fmt: skip
    frequencies = 100.0 ** -(torch.arange(5, device=DEVICE) / 5)
    positions = torch.tensor([*range(5), 20, *range(62, 65)], device=DEVICE)
    rotation = rotary_tables(positions, frequencies, 1.0)
    norms = (randn(10, seed=3), randn(10, seed=4))
    qkv = randn(9, (6 + 2 + 2) * 10, seed=5)
    found, expected = (
        backend.qkv_attention(qkv.clone(), norms, 1e-5, 1.0, rotation, cache, slots, case.metadata, case.scale, 40, 5.0)
        for backend, cache in ((ops, case.layer_cache), (reference, case.layer_cache.clone()))
    )
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "int8"])
def test_rows_attend_to_what_other_rows_of_the_step_store(narrow: bool) -> None:
    check_prefix_in_flight(strict(triton), torch.float32, DEVICE, narrow=narrow, rtol=1e-4, atol=1e-4)
