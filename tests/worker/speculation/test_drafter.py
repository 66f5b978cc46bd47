"""What is learnt of guesses, and of which sequences there are any."""

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from worker_helpers import state

from worker_service.session.sequence_state import PLACEHOLDER, ScheduledChunk, SequenceState
from worker_service.session.step import TOKENS, PoolingParams, PoolingType, SchedulerOutput
from worker_service.speculation.drafter import Beginning, Drafter
from worker_service.speculation.ngram import Ngrams
from worker_service.speculation.policy import StepCost

MAX = 4


class Served:
    """A drafter's worker and its scheduler: steps have the room that is wanted, after the step that is in flight."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.wanted: dict[int, int] = {}
        self.rooms: dict[int, int] = {}  # in the next step

    def step(
        self, seconds: float, *coming: tuple[SequenceState, Sequence[int]], more: Sequence[ScheduledChunk] = ()
    ) -> dict[int, list[int]]:
        """Compute the last token of each sequence, which goes on with these tokens as far as it is guessed; returns the
        guesses."""
        chunks = [
            ScheduledChunk(
                sequence,
                length - 1,
                length + (room := self.rooms.get(sequence.sequence_id, 0)),
                samples=True,
                drafts=array(TOKENS, [PLACEHOLDER]) * room,
            )
            for sequence, _ in coming
            for length in [len(sequence.token_ids)]
        ]
        rooms = tuple(len(chunk.drafts) for chunk in [*chunks, *more])
        output = SchedulerOutput(epoch=1, step_id=1, num_draft_tokens=rooms if any(rooms) else ())
        chunks = self.drafter.begins(output, [*chunks, *more])
        for chunk, (sequence, tokens) in zip(chunks, coming, strict=False):
            num_right = 0
            while num_right < len(chunk.drafts) and chunk.drafts[num_right] == tokens[num_right]:
                num_right += 1
            sequence.token_ids.extend(tokens[: num_right + 1])
        numbers = self.drafter.ends(chunks, seconds)
        self.rooms = dict(self.wanted)
        if numbers:
            sampling = (chunk.sequence.sequence_id for chunk in chunks if chunk.samples)
            self.wanted |= dict(zip(sampling, numbers, strict=True))
        return {chunk.sequence.sequence_id: list(chunk.drafts) for chunk in chunks if chunk.drafts}


def repeating(sequence: SequenceState) -> list[int]:
    """What follows if it goes on with 1, 2, 3, 1, 2, 3 and so on."""
    return [1 + (len(sequence.token_ids) + n) % 3 for n in range(1 + MAX)]


def test_room_is_wanted_where_there_are_guesses_and_is_used() -> None:
    served, sequence = Served(Drafter(Ngrams(), MAX, 100, 10_000)), state([1, 2, 3] * 5)
    found = [served.step(0.030, (sequence, repeating(sequence))) for _ in range(30)]
    assert found[:2] == [{}, {}]  # nothing is wanted before the first answer, and the step behind it is on its way
    assert all(guesses[1] for guesses in found[2:])
    assert len(found[-1][1]) == MAX


def test_guesses_that_are_never_right_are_soon_not_verified_and_are_again_once_they_would_be() -> None:
    served, sequence = Served(Drafter(Ngrams(), MAX, 100, 1_000)), state([1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2])
    few: list[bool] = []
    for number in range(60):  # it always goes on otherwise, and then as before
        tokens = (60 + number, 1, 2)[number % 3 : number % 3 + 1]
        few.append(bool(served.step(0.030, (sequence, [*tokens, 0, 0, 0, 0]))))
    assert any(few[:10])
    assert not any(few[40:])
    for _ in range(80):
        found = served.step(0.030, (sequence, repeating(sequence)))
    assert len(found[1]) == MAX


def test_where_steps_are_launched_ahead_the_wait_for_a_guess_counts() -> None:
    drafter, sequence = Drafter(Ngrams(), MAX, 100, 10_000, runs_ahead=True), state([1, 2, 3] * 5)
    served = Served(drafter)
    for number in range(100):
        found = served.step(0.005, (sequence, repeating(sequence)))
        if number > 5 and not found:
            break
        drafter.launched(SchedulerOutput(epoch=1, step_id=1, num_draft_tokens=(1,)), 0.5)
    assert 5 < number < 50


def test_where_they_are_not_a_launch_costs_nothing() -> None:
    drafter, sequence = Drafter(Ngrams(), MAX, 100, 10_000), state([1, 2, 3] * 5)
    served = Served(drafter)
    for number in range(60):
        drafter.launched(SchedulerOutput(epoch=1, step_id=1, num_draft_tokens=(1,)), 0.5)
        assert served.step(0.005, (sequence, repeating(sequence))) or number < 2


POOLED = {"pooling": PoolingParams(PoolingType.MEAN, 4)}


@pytest.mark.parametrize(
    ("sampling", "is_guessed"),
    [({"logprobs": 0}, True), ({"form": "{}"}, True), ({"is_beam": True}, False), (POOLED, False)],
)
def test_guesses_are_for_what_goes_on_with_one_token(sampling: dict[str, Any], is_guessed: bool) -> None:
    served, sequence = Served(Drafter(Ngrams(), MAX, 100, 10_000)), state([1, 2, 3] * 5, **sampling)
    for _ in range(5):
        served.step(0.030, (sequence, repeating(sequence)))
    assert bool(served.wanted) == is_guessed
    served.rooms = {1: MAX}  # whatever the scheduler says
    assert bool(served.step(0.030, (sequence, repeating(sequence)))) == is_guessed


def test_a_proposer_that_fails_is_not_asked_again_and_wants_no_more_room(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(Ngrams):
        num_asked = 0

        def propose(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
            self.num_asked += 1
            if self.num_asked > 5:
                raise IndexError("out of range")
            return super().propose(beginnings)

    proposer = Failing()
    served, sequence = Served(Drafter(proposer, MAX, 100, 10_000)), state([1, 2, 3] * 5)
    found = [served.step(0.030, (sequence, repeating(sequence))) for _ in range(12)]
    assert found[4]
    assert not any(found[7:])
    assert served.wanted == {1: 0}
    assert proposer.num_asked == 6
    assert capsys.readouterr().out.count("drafting failed, and has ended reason=") == 1


@pytest.mark.parametrize("no_token", [100, -1, 2**63])
def test_what_is_no_token_is_not_verified_and_nothing_behind_it(no_token: int) -> None:
    class Strange(Ngrams):
        def propose(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
            return [[5, 99, no_token, 5, 5, 5, 5, 5] for _ in beginnings]

    served, sequence = Served(Drafter(Strange(), MAX, 100, 10_000)), state([1, 2, 3])
    found = [served.step(0.030, (sequence, [5, 99, 5])) for _ in range(4)]
    assert found[-1] == {1: [5, 99]}


def test_sequences_that_do_not_sample_yet_want_no_room() -> None:
    drafter, sequence = Drafter(Ngrams(), MAX, 100, 10_000), state([1, 2, 3] * 5)
    assert not drafter.ends([ScheduledChunk(sequence, 0, 4, samples=False)], 0.030)


def test_what_is_wanted_is_said_when_it_changes() -> None:
    drafter, sequence = Drafter(Ngrams(), MAX, 100, 10_000), state([1, 2, 3] * 5)
    chunk = ScheduledChunk(sequence, 13, 14, samples=True)
    numbers = [drafter.ends([chunk], 0.030) for _ in range(50)]
    assert numbers[0]
    assert numbers[-1] == []
    said = [number for number in numbers if number]
    assert all(before != after for before, after in itertools.pairwise(said))


def test_a_token_that_a_step_ahead_has_yet_to_sample_is_not_taken_for_one() -> None:
    sequence = state([1, 2, 3] * 5)
    drafter = Drafter(Ngrams(), MAX, 100, 10_000, runs_ahead=True)
    chunk = ScheduledChunk(sequence, 13, 14, samples=True)
    sequence.token_ids.append(PLACEHOLDER)
    drafter.ends([chunk], 0.030)
    sequence.token_ids[15] = 1
    output = SchedulerOutput(epoch=1, step_id=2, num_draft_tokens=(MAX,))
    behind = ScheduledChunk(sequence, 15, 16 + MAX, samples=True, drafts=array(TOKENS, [PLACEHOLDER]) * MAX)
    (found,) = drafter.begins(output, [behind])
    assert not found.drafts  # what was guessed was for the place before
    (found,) = drafter.begins(output, [behind._replace(start=14, stop=15 + MAX)])
    assert list(found.drafts) == [1, 2, 3, 1]


def test_guesses_keep_no_sequence_from_growing() -> None:
    sequence = state([1, 2, 3] * 5)
    assert Drafter(Ngrams(), MAX, 100, 10_000).ends([ScheduledChunk(sequence, 13, 14, samples=True)], 0.030)
    sequence.token_ids.append(1)
    assert sequence.token_ids[-1:] == array(TOKENS, [1])


class FakeDraftModel:
    """Guesses 5, 5, 5 …, with so many seconds for a token of each sequence, and notes what it was asked."""

    def __init__(self, seconds: float, max_model_len: int = 10_000) -> None:
        self.max_model_len = max_model_len
        self.cost: StepCost | None = StepCost(0.0001)
        self.cost.observe(1, seconds)
        self.asked: list[list[tuple[int, int]]] = []

    def most_behind(self, num_tokens: int) -> int:
        return max(0, self.max_model_len - num_tokens + 1)

    def step_begins(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> None:
        pass

    def propose(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
        self.asked.append([(one.num_tokens, one.number) for one in beginnings])
        return [[5] * one.number for one in beginnings]


def test_a_draft_model_is_asked_where_its_guesses_are_worth_their_time_and_again_after_a_while() -> None:
    served, sequence = Served(Drafter(FakeDraftModel(0.002), MAX, 100, 10_000)), state([1, 2, 3])
    numbers = []
    for number in range(1000):
        found = served.step(0.030, (sequence, [5 if number > 500 else 6] * 5))
        numbers.append(len(found.get(1, [])))
    assert numbers[2] > 0
    assert 0 < sum(map(bool, numbers[100:500])) < 40  # it is always wrong, and tried again now and then
    assert numbers[-50:] == [MAX] * 50


def test_a_proposer_that_is_nearly_always_right_is_found_out_although_steps_are_short() -> None:
    served, sequence = Served(Drafter(FakeDraftModel(0.001), MAX, 100, 1_300)), state([1, 2, 3])
    numbers = [len(served.step(0.012, (sequence, [5] * 5)).get(1, [])) for _ in range(60)]
    assert sum(map(bool, numbers[-20:])) == 20


def test_no_room_is_wanted_behind_the_longest_that_a_draft_model_reads() -> None:
    proposer = FakeDraftModel(0.001, max_model_len=40)
    served, sequence = Served(Drafter(proposer, MAX, 100, 10_000)), state([1, 2, 3])
    found = [(len(sequence.token_ids), served.step(0.030, (sequence, [5] * 5))) for _ in range(30)]
    assert all(length + len(guesses[1]) <= 41 for length, guesses in found if guesses)
    assert max(len(guesses.get(1, [])) for _, guesses in found) == MAX
    assert served.wanted == {1: 0}
    assert all(num_tokens <= 40 for asked in proposer.asked for num_tokens, _ in asked)


def test_a_draft_model_follows_no_sequence_that_nothing_is_guessed_for() -> None:
    proposer = FakeDraftModel(0.001)
    served, sequence = Served(Drafter(proposer, MAX, 100, 10_000)), state([1, 2, 3])
    beam, pooled = state(range(20), sequence_id=2, is_beam=True), state(range(30), sequence_id=3, **POOLED)
    others = [ScheduledChunk(beam, 19, 20, samples=True), ScheduledChunk(pooled, 0, 20, samples=False)]
    for number in range(4):
        served.step(0.030, (sequence, [5] * 5), more=others if number > 1 else ())
    assert len(proposer.asked) == 2
    assert all(len(asked) == 1 for asked in proposer.asked)


@pytest.mark.parametrize(("seconds", "asked"), [(0.002, [(5, 4), (17, 0)]), (0.060, None)])
def test_a_draft_model_follows_prompts_only_while_it_is_worth_asking(
    seconds: float, asked: list[tuple[int, int]] | None
) -> None:
    proposer, prompt = FakeDraftModel(seconds), state(list(range(40)), sequence_id=2)
    served, sequence = Served(Drafter(proposer, MAX, 100, 10_000)), state([1, 2, 3])
    for _ in range(2):
        served.step(0.030, (sequence, [5] * 5))
    served.step(0.030, (sequence, [5] * 5), more=[ScheduledChunk(prompt, 16, 32, samples=False)])
    assert proposer.asked == ([asked] if asked else [])
