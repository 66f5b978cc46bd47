"""Paged attention against dense attention in float64, with everything that a sequence does not own poisoned."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.inputs import AttentionMetadata
from kernels.reference import paged_attention

NAN = float("nan")


@dataclass
class Case:
    """A step over a cache in which only the sequences' own slots are not NaN."""

    query_lens: list[int]
    context_lens: list[int]
    query: Tensor
    layer_cache: Tensor
    block_tables: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    def run(
        self,
        rows: slice = slice(None),
        window: int | None = None,
        bias: Tensor | None = None,
        causal: bool = True,
        sinks: Tensor | None = None,
        chunked: bool = False,
    ) -> Tensor:
        """Attend with only some of the sequences in the step."""
        query_lens, context_lens = self.query_lens[rows], self.context_lens[rows]
        first = sum(self.query_lens[: rows.start or 0])
        metadata = AttentionMetadata.build(query_lens, context_lens, self.block_tables[rows], torch.device("cpu"))
        query = self.query[first : first + sum(query_lens)]
        return paged_attention(query, self.layer_cache, metadata, 0.3, window, None, bias, causal, sinks, chunked)


def make_case(
    lens: list[tuple[int, int]], block_size: int, num_kv_heads: int, groups: int, head_dim: int, seed: int = 0
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    query_lens = [query_len for query_len, _ in lens]
    context_lens = [computed + query_len for query_len, computed in lens]
    num_blocks = [-(-context_len // block_size) for context_len in context_lens]
    # A pool of all layers, of which the middle one is attended; block 0 belongs to no sequence.
    pool = torch.full((sum(num_blocks) + 2, 3, 2, block_size, num_kv_heads, head_dim), NAN)
    layer_cache = pool[:, 1]
    shuffled = (torch.randperm(sum(num_blocks) + 1, generator=generator) + 1).tolist()
    block_tables = torch.full((len(lens), max(num_blocks) + 2), len(pool) + 99)
    keys, values = [], []
    for row, (context_len, needed) in enumerate(zip(context_lens, num_blocks, strict=True)):
        block_tables[row, :needed] = torch.tensor([shuffled.pop() for _ in range(needed)])
        key, value = torch.randn(2, context_len, num_kv_heads, head_dim, generator=generator)
        for position in range(context_len):
            block = block_tables[row, position // block_size]
            layer_cache[block, 0, position % block_size] = key[position]
            layer_cache[block, 1, position % block_size] = value[position]
        keys.append(key)
        values.append(value)
    query = torch.randn(sum(query_lens), num_kv_heads * groups, head_dim, generator=generator)
    return Case(query_lens, context_lens, query, layer_cache, block_tables, keys, values)


def dense(
    case: Case,
    window: int | None = None,
    bias: Tensor | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """The obvious way: one query token and one head at a time."""
    output = torch.empty_like(case.query, dtype=torch.float64)
    groups = case.query.shape[1] // case.layer_cache.shape[3]
    row = 0
    for query_len, context_len, key, value in zip(
        case.query_lens, case.context_lens, case.keys, case.values, strict=True
    ):
        for position in range(context_len - query_len, context_len):
            for head in range(case.query.shape[1]):
                first = 0 if window is None else max(0, position - window + 1)
                first = max(range(0, position + 1, window or 1)) if chunked else first
                visible = slice(first, position + 1) if causal else slice(context_len)
                scores = key[visible, head // groups].double() @ case.query[row, head].double() * 0.3
                if bias is not None:
                    scores += torch.stack(
                        [bias[head, : position - other + 1][-1] for other in range(first, position + 1)]
                    )
                shown = value[visible, head // groups].double()
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1]))
                    shown = torch.cat((shown, torch.zeros_like(shown[:1])))
                output[row, head] = scores.softmax(0) @ shown
            row += 1
    return output.float()


@settings(max_examples=40, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 3, 4, 16]),
    heads=st.sampled_from([(1, 1), (2, 3), (3, 1)]),
    head_dim=st.sampled_from([2, 10, 16]),
)
def test_chunks_and_decodes_in_one_step_match_dense_attention(
    lens: list[tuple[int, int]], block_size: int, heads: tuple[int, int], head_dim: int
) -> None:
    case = make_case(lens, block_size, *heads, head_dim)
    torch.testing.assert_close(case.run(), dense(case), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("num_distances", [1, 5, 60])
@pytest.mark.parametrize(("block_size", "head_dim", "dtype", "tolerance"), [
    (1, 5, torch.float32, 1e-5), (16, 64, torch.float32, 1e-5), (16, 80, torch.bfloat16, 3e-2)
])  # fmt: skip
def test_a_bias_is_added_by_distance_and_its_last_entry_beyond(
    block_size: int, head_dim: int, dtype: torch.dtype, tolerance: float, num_distances: int, window: int | None
) -> None:
    case = make_case([(1, 40), (7, 9), (3, 0)], block_size, 2, 2, head_dim)
    bias = torch.randn(4, num_distances, generator=torch.Generator().manual_seed(1)) * 2
    expected = dense(case, window, bias)
    case.query, case.layer_cache = case.query.to(dtype), case.layer_cache.to(dtype)
    found = case.run(window=window, bias=bias)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 6])
def test_a_sink_is_the_score_of_a_key_whose_value_is_zero(window: int | None) -> None:
    case = make_case([(1, 40), (7, 9), (3, 0)], 16, 2, 2, 10)
    sinks = torch.tensor([-2.0, 0.0, 1.5, 9.0])
    torch.testing.assert_close(
        case.run(window=window, sinks=sinks), dense(case, window, sinks=sinks), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("size", [1, 4, 6, 50])
def test_tokens_attend_to_their_own_chunk(size: int) -> None:
    case = make_case([(1, 40), (1, 35), (9, 9), (12, 0), (6, 48)], 4, 2, 2, 10)
    found = case.run(window=size, chunked=True)
    torch.testing.assert_close(found, dense(case, size, chunked=True), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 16])
def test_queries_that_see_a_whole_context_may_be_more_than_its_tokens(block_size: int) -> None:
    case = make_case([(1, 40), (9, -6), (3, 0), (5, 20)], block_size, num_kv_heads=2, groups=2, head_dim=5)
    torch.testing.assert_close(case.run(causal=False), dense(case, causal=False), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_tokens_of_an_image_attend_to_later_tokens_of_it(window: int | None) -> None:
    """The second chunk begins inside an image of tokens 2 to 8."""
    case = make_case([(1, 4), (7, 3)], 4, 2, 2, 10)
    ends = [4, *[8] * 6, 9]
    tables, cpu = case.block_tables, torch.device("cpu")
    metadata = AttentionMetadata.build(case.query_lens, case.context_lens, tables, cpu, ends)
    found = paged_attention(case.query, case.layer_cache, metadata, 0.3, window)
    for row, (position, end) in enumerate(zip([4, *range(3, 10)], ends, strict=True)):
        visible = slice(0 if window is None else max(0, position - window + 1), end + 1)
        for head in range(4):
            keys, values = (each[row > 0][visible, head // 2] for each in (case.keys, case.values))
            expected = (keys @ case.query[row, head] * 0.3).softmax(0) @ values
            torch.testing.assert_close(found[row, head], expected, atol=1e-5, rtol=1e-5)
    for options in ({"causal": False}, {"bias": torch.zeros(4, 1)}, {"window": 3, "chunked": True}):
        with pytest.raises(ValueError, match="visible_ends exclude"):
            paged_attention(case.query, case.layer_cache, metadata, 0.3, **options)


@pytest.mark.parametrize(("options", "sentence"), [
    ({"causal": False, "window": 3}, "neither a window nor a bias"),
    ({"chunked": True}, "needs the size of a chunk"),
    ({"causal": False, "bias": torch.zeros(4, 1)}, "neither a window nor a bias"),
    ({"soft_cap": 1.0, "bias": torch.zeros(4, 1)}, "a bias or a soft cap, not both"),
    *(({"bias": bias}, r"must be contiguous float32 of \(4 heads, at least one distance\) on cpu") for bias in (
        torch.zeros(3, 1), torch.zeros(4, 0), torch.zeros(4), torch.zeros(1, 4).T.expand(4, 2),
        torch.zeros(4, 1).bfloat16(), torch.zeros(4, 1, device="meta"),
    )),
    *(({"sinks": sinks}, r"must be contiguous float32 of \(4 heads\) on cpu") for sinks in (
        torch.zeros(3), torch.zeros(4, 1), torch.zeros(4).half(), torch.zeros(8)[::2],
    )),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], sentence: str) -> None:
    case = make_case([(1, 5)], block_size=4, num_kv_heads=2, groups=2, head_dim=8)
    metadata = AttentionMetadata.build(case.query_lens, case.context_lens, case.block_tables, torch.device("cpu"))
    with pytest.raises(ValueError, match=sentence):
        paged_attention(case.query, case.layer_cache, metadata, 0.3, **options)


def test_garbage_in_unused_slots_never_reaches_a_row() -> None:
    case = make_case([(1, 5), (1, 0), (4, 3), (1, 31)], block_size=4, num_kv_heads=2, groups=2, head_dim=8)
    assert case.layer_cache.isnan().any()
    assert case.run().isfinite().all()


def test_a_poisoned_sequence_spoils_no_other() -> None:
    case = make_case([(1, 5), (1, 7), (3, 2), (3, 0)], block_size=4, num_kv_heads=2, groups=2, head_dim=8)
    clean = case.run()
    for row in (1, 3):
        case.layer_cache[case.block_tables[row, 0]] = NAN
    poisoned = case.run()
    assert torch.equal(poisoned[:1], clean[:1])
    assert poisoned[1].isnan().all()
    assert torch.equal(poisoned[2:5], clean[2:5])


def test_a_row_is_the_same_alone_and_among_others() -> None:
    case = make_case([(1, 5), (1, 300), (1, 40), (5, 2)], block_size=16, num_kv_heads=2, groups=3, head_dim=16)
    together = case.run()
    row = 0
    for number, query_len in enumerate(case.query_lens):
        alone = case.run(slice(number, number + 1))
        torch.testing.assert_close(together[row : row + query_len], alone, atol=1e-6, rtol=1e-6)
        row += query_len


@pytest.mark.parametrize("window", [1, 4, 6, 50])
def test_blocks_behind_a_window_are_never_read(window: int) -> None:
    case = make_case([(1, 5), (1, 0), (6, 15), (1, 31)], block_size=4, num_kv_heads=2, groups=2, head_dim=8)
    metadata = AttentionMetadata.build(case.query_lens, case.context_lens, case.block_tables, torch.device("cpu"))
    whole = paged_attention(case.query, case.layer_cache, metadata, 0.3, window)
    for row, (query_len, context_len) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
        metadata.block_tables[row, : max(0, context_len - query_len - window + 1) // 4] = len(case.layer_cache) + 99
    assert torch.equal(paged_attention(case.query, case.layer_cache, metadata, 0.3, window), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_close(dtype: torch.dtype) -> None:
    case = make_case([(1, 20), (7, 9)], block_size=4, num_kv_heads=2, groups=2, head_dim=16)
    expected = dense(case)
    case.query, case.layer_cache = case.query.to(dtype), case.layer_cache.to(dtype)
    torch.testing.assert_close(case.run().float(), expected, atol=3e-2, rtol=3e-2)
