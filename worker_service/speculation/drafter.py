"""What a worker guesses in a step, and what it learns from what came instead."""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import structlog

from worker_service.session.session import NO_DRAFTS, ScheduledChunk, SequenceState
from worker_service.session.step import TOKENS, SchedulerOutput
from worker_service.speculation.policy import (
    FIRST_CHANCE,
    FIRST_PAUSE,
    FIRST_SHARE,
    FORGETTING,
    HOPE,
    LEARNING,
    StepCost,
    numbers_of_guesses,
)
from worker_service.wording import reason

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Beginning:
    """A sequence whose first `num_tokens` tokens are known, of which a proposer is to guess `number` more."""

    sequence: SequenceState
    num_tokens: int
    number: int


class Proposer(Protocol):
    """Where guesses come from."""

    @property
    def cost(self) -> StepCost | None:
        """Of guessing one token for each of some sequences; None where that takes no time worth counting.

        What costs nothing is guessed behind every step, whether or not there is room for it in the next, so that there
        is always something to learn from.
        """

    def most_behind(self, num_tokens: int) -> int:
        """How many guesses there can be behind so many tokens of a sequence."""

    def step_begins(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> None:
        """The device is about to compute this step, with at most the guesses that there is room for."""

    def guess(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
        """The guesses for each of them, at most its number."""


@dataclass(slots=True)
class _Record:
    """Of one sequence."""

    chance: float
    """That a guess is right if those before it are."""
    share: float
    """How often there is any guess."""
    guessed: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Of the sequence, when that was guessed."""
    wanted: int = 0
    """For how many guesses its steps should have room, as the scheduler knows it."""


class Drafter:
    """Guesses for one worker. Only the device thread uses it.

    When a step `begins` that has room for guesses, those that are worth verifying are made; when it `ends`, what came
    is compared with them, and room is asked for in later steps.
    """

    def __init__(
        self,
        proposer: Proposer,
        most: int,
        vocabulary_size: int,
        prefill_tokens_per_second: int,
        *,
        runs_ahead: bool = False,
    ) -> None:
        """most: guesses for one sequence in one step. runs_ahead: whether steps without guesses are launched before
        those before them have ended."""
        self._proposer = proposer
        self._most = most
        self._vocabulary_size = vocabulary_size
        self._cost = StepCost(1 / prefill_tokens_per_second if prefill_tokens_per_second else 0.0)
        self._first_chance = FIRST_CHANCE if proposer.cost is None else HOPE
        self._chance = self._first_chance  # of sequences that nothing is known of
        self._runs_ahead = runs_ahead
        self._pause = FIRST_PAUSE if runs_ahead else 0.0
        self._seconds_before = self._seconds_after = 0.0  # a step, of the drafter itself
        self._has_failed = False

    def begins(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
        """The step's chunks with the guesses that it is to verify, in place of the room for them."""
        if self._has_failed:
            return [chunk.with_drafts(NO_DRAFTS) for chunk in chunks]
        self._proposer.step_begins(output, chunks)
        if not output.num_draft_tokens:
            return list(chunks)
        began = time.perf_counter()
        records = [self._record(chunk.sequence) for chunk in chunks]
        rooms = [len(chunk.drafts) * may_be_guessed_for(chunk.sequence) for chunk in chunks]
        for row, (chunk, record) in enumerate(zip(chunks, records, strict=True)):
            num_known = chunk.start + 1
            if self._proposer.cost is None:
                rooms[row] = min(rooms[row], len(record.guessed) * (record.num_tokens == num_known))
            elif rooms[row]:
                rooms[row] = min(rooms[row], self._proposer.most_behind(num_known))
        # The pause for this step is paid already.
        numbers = numbers_of_guesses(
            [record.chance for record in records], rooms, self._cost, 0.0, guessing=self._proposer.cost
        )
        if self._proposer.cost is not None and any(numbers):
            proposing = time.perf_counter()
            self._propose_in_step(chunks, numbers)
            began += time.perf_counter() - proposing  # which has a cost of its own
        drafts = [record.guessed[:number] for record, number in zip(records, numbers, strict=True)]
        self._seconds_before = time.perf_counter() - began
        return [
            chunk.with_drafts(array(TOKENS, takewhile(self._is_token, drafted)))
            for chunk, drafted in zip(chunks, drafts, strict=True)
        ]

    def _propose_in_step(self, chunks: Sequence[ScheduledChunk], numbers: Sequence[int]) -> None:
        """Guess so many tokens behind each chunk, and have what guesses follow prompts that are under way."""
        beginnings = [
            Beginning(chunk.sequence, chunk.start + 1, number)
            for chunk, number in zip(chunks, numbers, strict=True)
            if may_be_guessed_for(chunk.sequence) and self._proposer.most_behind(chunk.start + 1)
        ]
        for one, guessed in zip(beginnings, self._propose(beginnings), strict=True):
            record = self._record(one.sequence)
            record.guessed, record.num_tokens = guessed, one.num_tokens

    def _is_token(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocabulary_size

    def launched(self, output: SchedulerOutput, seconds: float) -> None:
        """To launch this step took so long; the device waited for that, and for what was decided before it."""
        if self._runs_ahead and output.num_draft_tokens:
            waited = self._seconds_after + self._seconds_before + seconds
            self._pause += LEARNING * (waited - self._pause)

    def ends(self, chunks: Sequence[ScheduledChunk], seconds: float) -> list[int]:
        """For how many guesses each sequence that samples should have room from now on, after a step of these chunks
        that took so long; nothing if that is as it was."""
        began = time.perf_counter()
        numbers = self._wanted(chunks, seconds)
        self._seconds_after = time.perf_counter() - began
        return numbers

    def _wanted(self, chunks: Sequence[ScheduledChunk], seconds: float) -> list[int]:
        records = [self._record(chunk.sequence) for chunk in chunks]
        wanted = [0] * len(chunks)
        if not self._has_failed:
            if all(chunk.stop - chunk.start <= 1 + self._most for chunk in chunks):
                self._cost.observe(sum(chunk.stop - chunk.start for chunk in chunks), seconds)
            going_on = [chunk.samples and may_be_guessed_for(chunk.sequence) for chunk in chunks]
            ends = [
                (chunk.sequence, _num_known(chunk)) for chunk, goes_on in zip(chunks, going_on, strict=True) if goes_on
            ]
            for sequence, num_tokens in ends:
                self._learn(sequence, num_tokens)
            if self._proposer.cost is None:
                self._look_up(ends)
            mosts = [
                min(self._most, self._proposer.most_behind(_num_known(chunk))) if goes_on else 0
                for chunk, goes_on in zip(chunks, going_on, strict=True)
            ]
            numbers = numbers_of_guesses(
                [record.chance for record in records],
                mosts,
                self._cost,
                self._pause,
                shares=[record.share for record in records],
                guessing=self._proposer.cost,
            )
            # How many are worth verifying is found when it is known what is guessed.
            wanted = [most if number else 0 for most, number in zip(mosts, numbers, strict=True)]
        sampling = [
            (record, number) for record, number, chunk in zip(records, wanted, chunks, strict=True) if chunk.samples
        ]
        if all(record.wanted == number for record, number in sampling):
            return []
        for record, number in sampling:
            record.wanted = number
        return [number for _, number in sampling]

    def _look_up(self, ends: Sequence[tuple[SequenceState, int]]) -> None:
        """Guess how these sequences go on behind so many tokens, whether or not it will be verified."""
        found = self._propose([Beginning(sequence, num_tokens, self._most) for sequence, num_tokens in ends])
        for (sequence, num_tokens), guessed in zip(ends, found, strict=True):
            record = self._record(sequence)
            record.guessed, record.num_tokens = guessed, num_tokens
            record.share += LEARNING * (bool(guessed) - record.share)

    def _propose(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
        try:
            return self._proposer.guess(beginnings)
        except Exception as error:  # the step has its tokens, whatever is wrong with guesses
            log.exception("guessing failed, and has ended", reason=reason(error))
            self._has_failed = True
            return [[] for _ in beginnings]

    def _learn(self, sequence: SequenceState, num_tokens: int) -> None:
        """Compare what came with what was guessed. num_tokens: those that are known."""
        record = self._record(sequence)
        came = sequence.token_ids[record.num_tokens : num_tokens] if record.guessed else ()
        for guessed, token_id in zip(record.guessed, came, strict=False):
            is_right = guessed == token_id
            record.chance += LEARNING * 2 * (is_right - record.chance)
            self._chance += LEARNING / 4 * (is_right - self._chance)
            if not is_right:
                break
        if self._proposer.cost is not None and not record.guessed:
            record.chance += FORGETTING * (self._first_chance - record.chance)
            self._chance += FORGETTING / 4 * (self._first_chance - self._chance)
        record.guessed = []

    def _record(self, sequence: SequenceState) -> _Record:
        if not isinstance(sequence.speculation, _Record):
            sequence.speculation = _Record(self._chance, 1.0 if self._proposer.cost is not None else FIRST_SHARE)
        return sequence.speculation


def _num_known(chunk: ScheduledChunk) -> int:
    """The tokens of its sequence that are known after it: where the next step runs ahead, a place for that step's token
    is there already."""
    if chunk.drafts:
        return len(chunk.sequence.token_ids)
    return min(chunk.stop + chunk.samples, len(chunk.sequence.token_ids))  # one that was late has no token


def may_be_guessed_for(sequence: SequenceState) -> bool:
    """What is pooled has no next token, and a beam goes on with several."""
    sampling = sequence.sampling
    return (
        sampling.pooling is None
        and not sampling.is_beam
        and not (sampling.prompt_logprobs is not None and sequence.num_computed_tokens < sequence.num_prompt_tokens)
    )
