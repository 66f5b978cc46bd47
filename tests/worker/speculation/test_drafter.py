"""What is learnt of guesses, and of which sequences there are any."""

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from worker_helpers import state

from worker_service.session.session import PLACEHOLDER, ScheduledChunk, SequenceState
from worker_service.session.step import TOKENS, PoolingParams, PoolingType, SchedulerOutput
from worker_service.speculation import drafter as module
from worker_service.speculation.drafter import Beginning, Drafter
from worker_service.speculation.ngram import Ngrams
from worker_service.speculation.policy import StepCost

PLAIN = SchedulerOutput(epoch=1, step_id=1)
VERIFIES = SchedulerOutput(epoch=1, step_id=1, draft_tokens={1: array(TOKENS, [1])})


def chunk_of(sequence: SequenceState) -> ScheduledChunk:
    """The step that sampled its last token."""
    length = len(sequence.token_ids)
    return ScheduledChunk(sequence, length - 2, length - 1, samples=True)


def gain(sequence: SequenceState, *token_ids: int) -> None:
    sequence.token_ids.extend(token_ids)


def test_guesses_that_are_never_right_are_soon_not_verified_and_are_again_once_they_would_be() -> None:
    drafter, sequence = Drafter(Ngrams(), 4, 10_000), state([1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2])
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
    drafter, sequence = Drafter(Ngrams(), 4, 10_000), state([1, 2, 3] * 5)
    for number in range(100):
        if not drafter.guess([chunk_of(sequence)], 0.005):
            break
        clock[0] += 0.5  # the network is slow
        drafter.step_begins(VERIFIES, [])
        gain(sequence, 1 + number % 3)
    assert number < 50


POOLED = {"pooling": PoolingParams(PoolingType.MEAN, 4)}


@pytest.mark.parametrize(
    ("sampling", "is_guessed"),
    [({"logprobs": 0}, True), ({"form": "{}"}, True), ({"is_beam": True}, False), (POOLED, False)],
)
def test_guesses_are_for_what_goes_on_with_one_token(sampling: dict[str, Any], is_guessed: bool) -> None:
    drafter, sequence = Drafter(Ngrams(), 4, 10_000), state([1, 2, 3] * 5, **sampling)
    assert bool(drafter.guess([chunk_of(sequence)], 0.030)) == is_guessed


def test_a_proposer_that_fails_is_not_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(Ngrams):
        num_asked = 0

        def guess(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
            self.num_asked += 1
            raise IndexError("out of range")

    proposer = Failing()
    drafter, sequence = Drafter(proposer, 4, 10_000), state([1, 2, 3] * 5)
    for _ in range(3):
        assert not drafter.guess([chunk_of(sequence)], 0.030)
    assert proposer.num_asked == 1
    assert capsys.readouterr().out.count("guessing failed, and has ended reason=") == 1


def test_sequences_that_do_not_sample_yet_have_no_guesses() -> None:
    drafter, sequence = Drafter(Ngrams(), 4, 10_000), state([1, 2, 3] * 5)
    assert not drafter.guess([ScheduledChunk(sequence, 0, 4, samples=False)], 0.030)


def test_time_without_requests_is_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    drafter, sequence = Drafter(Ngrams(), 4, 10_000), state([1, 2, 3] * 5)
    for number in range(100):
        assert drafter.guess([chunk_of(sequence)], 0.030)
        clock[0] += 3600.0
        drafter.step_begins(PLAIN, [])
        gain(sequence, 1 + number % 3)


def test_a_token_that_a_step_ahead_has_yet_to_sample_is_not_taken_for_one() -> None:
    sequence = state([1, 2, 3] * 5)
    chunk = chunk_of(sequence)
    sequence.token_ids.append(PLACEHOLDER)
    assert Drafter(Ngrams(), 4, 10_000).guess([chunk], 0.030) == {1: [1, 2, 3, 1]}


def test_guesses_keep_no_sequence_from_growing() -> None:
    sequence = state([1, 2, 3] * 5)
    assert Drafter(Ngrams(), 4, 10_000).guess([chunk_of(sequence)], 0.030)
    sequence.token_ids.append(1)
    assert sequence.token_ids[-1:] == array(TOKENS, [1])


class FakeDraftModel:
    """Guesses 5, 5, 5 …, with so many seconds for a token of each sequence, and notes what it was asked."""

    def __init__(self, seconds: float) -> None:
        self.cost: StepCost | None = StepCost(0.0001)
        self.cost.observe(1, seconds)
        self.asked: list[list[tuple[int, int]]] = []

    def step_begins(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> None:
        pass

    def guess(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
        self.asked.append([(one.num_tokens, one.number) for one in beginnings])
        return [[5] * one.number for one in beginnings]


def test_a_draft_model_is_asked_where_its_guesses_are_worth_their_time_and_again_after_a_while() -> None:
    proposer = FakeDraftModel(0.002)
    drafter, sequence = Drafter(proposer, 4, 10_000), state([1, 2, 3])
    numbers = []
    for number in range(1000):
        found = drafter.guess([chunk_of(sequence)], 0.030)
        numbers.append(len(found.get(1, [])))
        gain(sequence, 5 if number > 500 else 6)
    assert numbers[0] > 0
    assert 0 < sum(map(bool, numbers[100:500])) < 40  # it is always wrong, and tried again now and then
    assert numbers[-50:] == [4] * 50


def test_a_proposer_that_is_nearly_always_right_is_found_out_although_steps_are_short() -> None:
    """With the chance of what is known of nothing a guess would not be worth the pause behind it."""
    drafter, sequence = Drafter(FakeDraftModel(0.001), 4, 1_300), state([1, 2, 3])
    numbers = []
    for _ in range(60):
        found = drafter.guess([chunk_of(sequence)], 0.012)
        numbers.append(len(found.get(1, [])))
        gain(sequence, 5)
    assert sum(map(bool, numbers[-20:])) == 20


@pytest.mark.parametrize(("seconds", "asked"), [(0.002, [[(3, 4)], [(8, 4), (16, 0)]]), (0.060, [])])
def test_a_draft_model_follows_prompts_only_while_it_is_worth_asking(
    seconds: float, asked: list[list[tuple[int, int]]]
) -> None:
    proposer, prompt = FakeDraftModel(seconds), state(list(range(40)), sequence_id=2)
    drafter, sequence = Drafter(proposer, 4, 10_000), state([1, 2, 3])
    chunk = ScheduledChunk(prompt, 0, 16, samples=False)
    drafter.guess([chunk_of(sequence)], 0.030)
    gain(sequence, 5, 5, 5, 5, 5)
    drafter.guess([chunk_of(sequence), chunk], 0.030)
    assert proposer.asked == asked
