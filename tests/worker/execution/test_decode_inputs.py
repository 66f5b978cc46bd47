"""A captured decode reads the same tensors as a batch that is laid out anew, whatever the step before it held."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from worker_helpers import tokens

from worker_service.execution.images.axial_positions import axial_positions
from worker_service.execution.steps.decode_inputs import DecodeInputs, bucket_sizes
from worker_service.execution.steps.model_runner import build_batch
from worker_service.session.items import ImagePart, PromptItem
from worker_service.session.sequence_state import ScheduledChunk, SequenceState
from worker_service.session.step import SamplingParams

BLOCK_SIZES, MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_TOKENS = (3, 5), 30, 11, 4
MAX_NUM_ROWS = MAX_NUM_SEQS * MAX_TOKENS
blocks = st.lists(st.integers(1, 99), min_size=10, max_size=12)
lens = st.tuples(st.integers(1, MAX_TOKENS), st.integers(0, MAX_TOKENS - 1), st.integers(1, MAX_MODEL_LEN))
sequences = st.tuples(lens, blocks, st.integers(-1, 3))
steps = st.lists(st.tuples(st.lists(sequences, min_size=1, max_size=MAX_NUM_SEQS), st.booleans()), max_size=4)
CPU = torch.device("cpu")


def chunk_of(num_tokens: int, num_drafts: int, stop: int, block_ids: list[int]) -> ScheduledChunk:
    """A sequence's last tokens, of which the last may be guesses; fewer where it has no more."""
    start = max(0, stop - num_tokens)
    num_drafts = min(num_drafts, stop - start - 1)
    known = tokens(range(100, 100 + stop - num_drafts))
    tables = tokens(block_ids), (tokens(block_ids[::-1]),)
    sequence = SequenceState(1, known, 1, start, tables[0], SamplingParams(), further_tables=tables[1])
    return ScheduledChunk(sequence, start, stop, True, tokens(range(200, 200 + num_drafts)))


@given(steps)
def test_a_token_has_its_own_row_and_all_other_rows_are_padding(
    steps: list[tuple[list[tuple[tuple[int, int, int], list[int], int]], bool]],
) -> None:
    """Whatever the steps before have left there, in every group of layers; and the memory is the same in every step."""
    inputs = DecodeInputs(MAX_NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZES, CPU)

    def places() -> list[int]:
        token_ids, positions, slots, metadata = inputs.tensors(1)
        tables = [one.block_tables for one in metadata]
        return [tensor.data_ptr() for tensor in (token_ids, positions, *slots, *tables, inputs.adapter_slots(1))]

    places_before = places()
    for step, has_adapters in steps:
        chunks = [chunk_of(*lens, block_ids) for lens, block_ids, _ in step]
        batch = build_batch(chunks, BLOCK_SIZES[0], CPU, BLOCK_SIZES[1:])
        query_lens = [chunk.stop - chunk.start for chunk in chunks]
        adapter_slots = torch.repeat_interleave(torch.tensor([slot for *_, slot in step]), torch.tensor(query_lens))
        size = inputs.fill(chunks, adapter_slots=adapter_slots.to(torch.int32) if has_adapters else None)
        token_ids, positions, slots, metadata = inputs.tensors(size)
        assert size in bucket_sizes(MAX_NUM_ROWS)
        padding = [0] * (size - sum(query_lens))
        nothing = [-1 for _ in padding]
        assert token_ids.tolist() == batch.token_ids.tolist() + padding
        assert positions.tolist() == batch.positions.tolist() + nothing
        if has_adapters:
            assert inputs.adapter_slots(size).tolist() == adapter_slots.tolist() + nothing
        of_row = [number for number, query_len in enumerate(query_lens) for _ in range(query_len)]
        wanted = [(batch.slots, batch.attention), *batch.further]
        for block_size, found, (wanted_slots, attention), of_group in zip(
            BLOCK_SIZES, slots, wanted, metadata, strict=True
        ):
            assert found.tolist() == wanted_slots.tolist() + nothing
            assert of_group.query_start.tolist() == list(range(size + 1))
            assert of_group.context_lens.tolist() == (batch.positions + 1).tolist() + padding
            for row, (number, position) in enumerate(zip(of_row, batch.positions.tolist(), strict=True)):
                used = position // block_size + 1
                assert of_group.block_tables[row, :used].tolist() == attention.block_tables[number, :used].tolist()
            assert (of_group.max_query_len, of_group.max_context_len) == (1, MAX_MODEL_LEN)
        assert places() == places_before


def test_tokens_behind_an_image_have_the_positions_of_its_model_and_the_contexts_of_their_places() -> None:
    inputs = DecodeInputs(MAX_NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZES, CPU)
    chunk, other = chunk_of(2, 0, 9, [1, 2, 3, 4, 5]), chunk_of(1, 0, 5, [6, 7, 8])
    image = ImagePart(0, 40, 60, (3, 2))
    chunk.sequence.items = (PromptItem(b"i", 1, 7, image=image, shift=image.shift),)
    axes = axial_positions([chunk, other])
    assert axes is not None
    assert axes.tolist() == 3 * [[4, 5, 4]]
    _, positions, _, metadata = inputs.tensors(inputs.fill([chunk, other]))
    assert positions[:3].tolist() == axes[0].tolist()
    assert metadata[0].context_lens[:3].tolist() == [8, 9, 5]


@given(st.integers(1, 3000))
def test_buckets_rise_to_the_largest_batch_and_waste_little(max_num_rows: int) -> None:
    sizes = bucket_sizes(max_num_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_num_rows
    for smaller, larger in pairwise(sizes):
        wasted = larger - smaller - 1
        assert wasted <= 7 or wasted / larger < 0.2
