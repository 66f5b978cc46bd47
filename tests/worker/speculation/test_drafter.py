"""What is learnt of guesses, and of which sequences there are any."""

from array import array
from typing import Any

import pytest
from worker_helpers import state

from worker_service.session.session import PLACEHOLDER, ScheduledChunk, SequenceState
from worker_service.session.step import TOKENS
from worker_service.speculation import drafter as module
from worker_service.speculation.drafter import Drafter


def chunk_of(sequence: SequenceState) -> ScheduledChunk:
    """The step that sampled its last token."""
    length = len(sequence.token_ids)
    return ScheduledChunk(sequence, length - 2, length - 1, samples=True)


def gain(sequence: SequenceState, *token_ids: int) -> None:
    sequence.token_ids.extend(token_ids)


def test_guesses_that_are_never_right_are_soon_not_verified_and_are_again_once_they_would_be() -> None:
    drafter, sequence = Drafter(4, 10_000), state([1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2])
    few: list[bool] = []
    for _ in range(40):  # it always goes on otherwise, and then as before
        few.append(bool(drafter.guess([chunk_of(sequence)], 0.030)))
        gain(sequence, 50 + len(few), 1, 2)
    assert few[0]
    assert not any(few[20:])
    for number in range(60):
        found = drafter.guess([chunk_of(sequence)], 0.030)
        gain(sequence, (7, 8, 9)[number % 3])
    assert len(found[1]) == 4


def test_the_longer_a_pause_the_less_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    drafter, sequence = Drafter(4, 10_000), state([1, 2, 3] * 5)
    for number in range(100):
        if not drafter.guess([chunk_of(sequence)], 0.005):
            break
        clock[0] += 0.5  # the network is slow
        drafter.step_begins(has_drafts=True)
        gain(sequence, 1 + number % 3)
    assert number < 50


@pytest.mark.parametrize("sampling", [{"logprobs": 0}, {"form": "{}"}])
def test_what_is_reported_or_formed_token_by_token_is_not_guessed_for(sampling: dict[str, Any]) -> None:
    drafter, sequence = Drafter(4, 10_000), state([1, 2, 3] * 5, **sampling)
    assert not drafter.guess([chunk_of(sequence)], 0.030)


def test_sequences_that_do_not_sample_yet_have_no_guesses() -> None:
    drafter, sequence = Drafter(4, 10_000), state([1, 2, 3] * 5)
    assert not drafter.guess([ScheduledChunk(sequence, 0, 4, samples=False)], 0.030)


def test_time_without_requests_is_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    drafter, sequence = Drafter(4, 10_000), state([1, 2, 3] * 5)
    for number in range(100):
        assert drafter.guess([chunk_of(sequence)], 0.030)
        clock[0] += 3600.0
        drafter.step_begins(has_drafts=False)
        gain(sequence, 1 + number % 3)


def test_a_token_that_a_step_ahead_has_yet_to_sample_is_not_taken_for_one() -> None:
    sequence = state([1, 2, 3] * 5)
    chunk = chunk_of(sequence)
    sequence.token_ids.append(PLACEHOLDER)
    assert Drafter(4, 10_000).guess([chunk], 0.030) == {1: [1, 2, 3, 1]}


def test_guesses_keep_no_sequence_from_growing() -> None:
    sequence = state([1, 2, 3] * 5)
    assert Drafter(4, 10_000).guess([chunk_of(sequence)], 0.030)
    sequence.token_ids.append(1)
    assert sequence.token_ids[-1:] == array(TOKENS, [1])
