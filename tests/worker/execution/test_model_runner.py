"""A step's tensors say the same as its chunks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_helpers import tokens

from worker_service.execution.steps.model_runner import build_batch
from worker_service.session.sequence_state import ScheduledChunk, SequenceState
from worker_service.session.step import SamplingParams


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=6), st.integers(1, 7))
def test_rows_are_the_chunks_tokens_at_their_positions_and_slots(spans: list[tuple[int, int]], block_size: int) -> None:
    chunks = []
    for number, (start, length) in enumerate(spans):
        blocks = tokens([100 * number + (7 * block) % 61 for block in range(60)])
        token_ids = tokens([1000 * number + position for position in range(start + length + 3)])
        sequence = SequenceState(number, token_ids, 1, start, blocks, SamplingParams())
        chunks.append(ScheduledChunk(sequence, start, start + length, False))
    batch = build_batch(chunks, block_size, torch.device("cpu"))
    rows = [(chunk.sequence, position) for chunk in chunks for position in range(chunk.start, chunk.stop)]
    assert batch.token_ids.tolist() == [sequence.token_ids[position] for sequence, position in rows]
    assert batch.positions.tolist() == [position for _, position in rows]
    assert batch.slots.tolist() == [
        sequence.block_ids[position // block_size] * block_size + position % block_size for sequence, position in rows
    ]
    assert [stop - start for start, stop in zip(batch.query_start, batch.query_start[1:], strict=False)] == [
        length for _, length in spans
    ]
