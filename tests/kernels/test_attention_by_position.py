"""Attention whose sums depend on places alone: right, and with the same bits whatever else a step attends to."""

from dataclasses import replace
from importlib import import_module
from itertools import pairwise

import pytest
import torch
from attention_cases import CHUNKS, EDGES, Case, make_case
from image_metadata import with_images
from torch import Tensor
from triton_helpers import DEVICE, DTYPES, FEW_DTYPES, randn, strict

from kernels.inputs import AttentionMetadata
from kernels.triton import invariant

ops = strict(invariant)
module = import_module("kernels.triton.attention.attention_by_position")
SINKS = torch.tensor([-3.0, 0.5, 6.0], device=DEVICE)
OPTIONS: list[dict[str, object]] = [
    {}, {"window": 70, "sinks": SINKS}, {"window": 600}, {"soft_cap": 2.0}, {"bias": True}
]  # fmt: skip


def by_position(lens: list[tuple[int, int]], **shape: int) -> Case:
    return make_case(lens, attend=ops.paged_attention, **{"kv_heads": 1, "groups": 3} | shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_that_of_eager_torch(dtype: torch.dtype) -> None:
    check_options(by_position([*CHUNKS, *EDGES], dtype=dtype))


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("lens", [[(1, 510), (1, 511), (1, 512), (1, 1100)], [(3, 1022), (1, 5)]])
def test_attention_over_several_parts_is_that_of_eager_torch(lens: list[tuple[int, int]], dtype: torch.dtype) -> None:
    check_options(by_position(lens, dtype=dtype))


def check_options(case: Case) -> None:
    case.check()
    case.check(window=65)
    case.check(window=600, bias=randn(3, 33))
    case.check(soft_cap=2.0)
    case.check(causal=False)
    case.check(sinks=SINKS)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_a_token_has_the_bits_that_it_has_alone(dtype: torch.dtype, options: dict[str, object]) -> None:
    """Decodes and the tokens of chunks, of which each is computed as a decode of its own as well."""
    options = options | {"bias": randn(3, 33)} if "bias" in options else options
    case = by_position([(1, 1100), (40, 490), (1, 511), (1, 3)], dtype=dtype)
    together = case.run(**options)  # type: ignore[arg-type]
    for row, sequence, context in [(0, 0, 1101), (1, 1, 491), (22, 1, 512), (23, 1, 513), (40, 1, 530), (41, 2, 512)]:
        alone = replace(case, query=case.query[row : row + 1], metadata=one(case, sequence, 1, context))
        assert torch.equal(alone.run(**options)[0], together[row]), row  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_a_prompt_has_the_same_bits_in_any_chunks(dtype: torch.dtype) -> None:
    case = by_position([(35, 490)], dtype=dtype)  # tiles of 10 or 21 tokens
    whole = case.run()
    for borders in [(0, 1, 35), (0, 10, 21, 35), (0, 16, 35)]:
        parts = []
        for start, stop in pairwise(borders):
            metadata = one(case, 0, stop - start, 490 + stop)
            parts.append(replace(case, query=case.query[start:stop], metadata=metadata).run())
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("window", [None, 70])
def test_an_image_has_the_same_bits_in_a_chunk_that_begins_inside_it(window: int | None) -> None:
    images = [(0, 480, 540)]
    case = by_position([(60, 490)])
    case.metadata = with_images(case.metadata, images)
    whole = case.run(window)
    for start in (1, 22, 49):
        metadata = with_images(one(case, 0, 60 - start, 550), images)
        later = replace(case, query=case.query[start:], metadata=metadata).run(window)
        assert torch.equal(later, whole[start:])


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
@pytest.mark.parametrize("lens", [[(1, 1600), (1, 0), (1, 700)], [(12, 1015), (1, 1023)]])
def test_how_many_programs_share_the_work_changes_no_bit(
    lens: list[tuple[int, int]], options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU of one processor and of many, and in a graph that was captured for longer contexts."""
    case = by_position(lens)
    found = []
    for processors, longest in ((1, None), (3, None), (1000, None), (3, 20_000), (1, 20_000)):
        monkeypatch.setattr(module, "num_processors", lambda _, processors=processors: processors)
        of_longest = replace(case.metadata, max_context_len=longest or case.metadata.max_context_len)
        found.append(replace(case, metadata=of_longest).run(**options))  # type: ignore[arg-type]
    assert all(torch.equal(one, found[0]) for one in found)


def test_results_that_would_take_too_much_memory_are_merged_by_the_program_that_makes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = by_position([(1, 1600), (1, 0)])
    expected = case.run()
    monkeypatch.setattr(module, "_MAX_PARTIAL_BYTES", 0)
    monkeypatch.delattr(module, "merge_parts")
    assert torch.equal(case.run(), expected)


def test_a_padding_row_becomes_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    case = by_position([(1, 600), (1, 0)])
    expected = case.run()[0]
    case.metadata.context_lens[1] = 0
    for processors in (1, 1000):
        monkeypatch.setattr(module, "num_processors", lambda _, processors=processors: processors)
        found = case.run()
        assert torch.equal(found[0], expected)
        assert not found[1].any()


def one(case: Case, sequence: int, query_len: int, context: int) -> AttentionMetadata:
    """A step of this sequence alone, as it was when it had so many tokens."""
    tables: Tensor = case.metadata.block_tables[sequence : sequence + 1].cpu()
    return AttentionMetadata.build([query_len], [context], tables, DEVICE)
