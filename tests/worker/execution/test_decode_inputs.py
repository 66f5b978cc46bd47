"""A captured decode reads the same tensors as a batch that is laid out anew, whatever the step before it held."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from worker_helpers import tokens

from worker_service.execution.batch import build_batch
from worker_service.execution.decode_inputs import DecodeInputs, bucket_sizes
from worker_service.session.session import ScheduledChunk, SequenceState
from worker_service.session.step import SamplingParams

BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS = 3, 30, 11
blocks = st.lists(st.integers(1, 99), min_size=10, max_size=12)
sequences = st.tuples(st.integers(1, MAX_MODEL_LEN), blocks)
steps = st.lists(st.lists(sequences, min_size=1, max_size=MAX_NUM_SEQS), min_size=1, max_size=4)


@given(steps)
def test_a_sequence_has_its_own_row_and_all_other_rows_are_padding(
    steps: list[list[tuple[int, list[int]]]],
) -> None:
    inputs = DecodeInputs(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, torch.device("cpu"))
    for step in steps:
        chunks = [
            ScheduledChunk(
                SequenceState(1, tokens(range(100, 100 + length)), 1, length - 1, tokens(block_ids), SamplingParams()),
                length - 1,
                length,
                True,
            )
            for length, block_ids in step
        ]
        size = inputs.fill(chunks)
        token_ids, positions, slots, metadata = inputs.tensors(size)
        batch = build_batch(chunks, BLOCK_SIZE, torch.device("cpu"))
        assert size in bucket_sizes(MAX_NUM_SEQS)
        padding = [0] * (size - len(chunks))
        assert token_ids.tolist() == batch.token_ids.tolist() + padding
        assert positions.tolist() == batch.positions.tolist() + [-1 for _ in padding]
        assert slots.tolist() == batch.slots.tolist() + [-1 for _ in padding]
        assert metadata.query_start.tolist() == list(range(size + 1))
        assert metadata.context_lens.tolist() == batch.attention.context_lens.tolist() + padding
        for row, (length, _) in enumerate(step):
            used = -(-length // BLOCK_SIZE)
            assert metadata.block_tables[row, :used].tolist() == batch.attention.block_tables[row, :used].tolist()
        assert (metadata.max_query_len, metadata.max_context_len) == (1, MAX_MODEL_LEN)


@given(st.integers(1, 3000))
def test_buckets_rise_to_the_largest_batch_and_waste_little(max_num_seqs: int) -> None:
    sizes = bucket_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_num_seqs
    for smaller, larger in pairwise(sizes):
        wasted = larger - smaller - 1
        assert wasted <= 7 or wasted / larger < 0.2
