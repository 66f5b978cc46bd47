"""Transcripts' rules are Whisper's: held against transformers' own code."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worker_helpers import state

from worker_service.execution.sampling.logit_edits import edit_logits
from worker_service.session.step import TranscriptParams

VOCABULARY, END, FIRST = 40, 20, 25
PROMPT = [21, 22]
SUPPRESSED, BEGIN = (3, 24), (5, END)
PARAMS = TranscriptParams(FIRST, 6, END, SUPPRESSED, BEGIN)


def expected(logits: torch.Tensor, output: list[int]) -> torch.Tensor:
    from transformers import GenerationConfig
    from transformers.generation.logits_process import (
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    config = GenerationConfig(
        eos_token_id=END, no_timestamps_token_id=FIRST - 1, max_initial_timestamp_index=PARAMS.max_initial
    )
    ids, scores = torch.tensor([PROMPT + output]), logits[None].clone()
    processors: list[Any] = [
        SuppressTokensLogitsProcessor(SUPPRESSED),
        SuppressTokensAtBeginLogitsProcessor(BEGIN, len(PROMPT)),
        WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT)),
    ]
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0]


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=6), st.integers(0, 1000), st.sampled_from([0.1, 1, 5]))
def test_what_may_come_next_is_what_whisper_allows(output: list[int], seed: int, spread: float) -> None:
    """After whatever has come, and also when times together are likelier than any text."""
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread
    edited = logits[None].clone()
    edit_logits(edited, [state(PROMPT + output, len(PROMPT), transcript=PARAMS)])
    assert torch.equal(edited[0].isinf(), expected(logits, output).isinf())
    assert torch.equal(edited[0][~edited[0].isinf()], logits[~edited[0].isinf()])


def test_without_times_only_what_is_suppressed_is_banned() -> None:
    params = TranscriptParams(suppressed=SUPPRESSED, begin_suppressed=BEGIN)
    logits = torch.zeros(2, VOCABULARY)
    edit_logits(logits, [state(PROMPT, 2, transcript=params), state([*PROMPT, 7], 2, transcript=params)])
    assert logits.isinf().nonzero().tolist() == [[0, 3], [0, 5], [0, 20], [0, 24], [1, 3], [1, 24]]


def test_rows_beside_each_other_do_not_change_each_other() -> None:
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    sequences = [state(PROMPT + output, 2, transcript=PARAMS) for output in ([], [FIRST, 7], [FIRST, 7, FIRST + 3])]
    together = logits.clone()
    edit_logits(together, sequences)
    for row, sequence in enumerate(sequences):
        alone = logits[row : row + 1].clone()
        edit_logits(alone, [sequence])
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("missing", ["text", "times"])
def test_a_row_that_allows_nothing_stays_without_an_error(missing: str) -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, slice(0, FIRST) if missing == "text" else slice(FIRST, None)] = -torch.inf
    edit_logits(logits, [state([*PROMPT, FIRST, 7], 2, transcript=PARAMS)])
    assert not logits.isnan().any()
