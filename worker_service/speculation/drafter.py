"""What a worker guesses after each step, and what it learns from what came instead."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from worker_service.session.session import ScheduledChunk, SequenceState
from worker_service.session.step import SchedulerOutput
from worker_service.speculation.policy import (
    FIRST_CHANCE,
    FIRST_PAUSE,
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

        What costs nothing is guessed whether or not it is verified, so that there is always something to learn from.
        """

    def step_begins(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> None:
        """The device is about to compute this step."""

    def guess(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
        """The guesses for each of them, at most its number."""


@dataclass(slots=True)
class _Record:
    """Of one sequence: what was guessed last, and the chance that a guess is right if those before it are."""

    chance: float
    guessed: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Of the sequence, when that was guessed."""


class Drafter:
    """Guesses for one worker. Only the device thread uses it."""

    def __init__(self, proposer: Proposer, most: int, prefill_tokens_per_second: int) -> None:
        """most: guesses for one sequence in one step."""
        self._proposer = proposer
        self._most = most
        self._cost = StepCost(1 / prefill_tokens_per_second if prefill_tokens_per_second else 0.0)
        self._first_chance = FIRST_CHANCE if proposer.cost is None else HOPE
        self._chance = self._first_chance  # of sequences that nothing is known of
        self._pause = FIRST_PAUSE
        self._has_asked = False  # whether the last answer had guesses, so that the next step waits for this one
        self._answered_at: float | None = None
        self._has_failed = False

    def step_begins(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> None:
        """A step has come; if it verifies guesses, it waited for the answer that brought them."""
        if output.draft_tokens and self._answered_at is not None:
            self._pause += LEARNING * (time.monotonic() - self._answered_at - self._pause)
        self._answered_at = None
        self._proposer.step_begins(output, chunks)

    def guess(self, chunks: Sequence[ScheduledChunk], seconds: float) -> Mapping[int, list[int]]:
        """Guesses to verify, by sequence id, after a step of these chunks that took so long; none of most."""
        if self._has_failed:
            return {}
        if all(chunk.stop - chunk.start <= 1 + self._most for chunk in chunks):
            self._cost.observe(sum(chunk.stop - chunk.start for chunk in chunks), seconds)
        known = {chunk.sequence.sequence_id: _num_known(chunk) for chunk in chunks}
        guessing = [chunk.sequence for chunk in chunks if may_be_guessed_for(chunk.sequence)]
        sampling = {chunk.sequence.sequence_id for chunk in chunks if chunk.samples}
        for sequence in guessing:
            if sequence.sequence_id in sampling:
                self._learn(sequence, known[sequence.sequence_id])

        def propose(sequences: Sequence[SequenceState], numbers: Sequence[int]) -> list[list[int]]:
            beginnings = [
                Beginning(sequence, known[sequence.sequence_id], number * (sequence.sequence_id in sampling))
                for sequence, number in zip(sequences, numbers, strict=True)
            ]
            try:
                return self._proposer.guess(beginnings)
            except Exception as error:  # the step has its tokens, whatever is wrong with guesses
                log.exception("guessing failed, and has ended", reason=reason(error))
                self._has_failed = True
                return [[] for _ in sequences]

        if self._proposer.cost is None:
            guesses = propose(guessing, [self._most] * len(guessing))
            guessing = [sequence for sequence, guessed in zip(guessing, guesses, strict=True) if guessed]
            guesses = [guessed for guessed in guesses if guessed]
            numbers = self._numbers(guessing, len(chunks))
        else:
            numbers = self._numbers(guessing, len(chunks))
            guesses = propose(guessing, numbers) if any(numbers) else [[] for _ in guessing]
        drafts = {}
        for sequence, guessed, number in zip(guessing, guesses, numbers, strict=True):
            record = self._record(sequence)
            record.guessed, record.num_tokens = guessed, known[sequence.sequence_id]
            if guessed[:number]:
                drafts[sequence.sequence_id] = guessed[:number]
        self._has_asked = bool(drafts)
        if drafts:
            self._answered_at = time.monotonic()
        return drafts

    def _numbers(self, sequences: Sequence[SequenceState], num_computed: int) -> list[int]:
        """How many guesses each of these is worth beside the others that a step computes."""
        chances = [self._record(sequence).chance for sequence in sequences]
        numbers = numbers_of_guesses(
            chances + [0.0] * (num_computed - len(sequences)),
            self._most,
            self._cost,
            self._pause,
            is_late=not self._has_asked,
            guessing=self._proposer.cost,
        )
        return numbers[: len(sequences)]

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
            sequence.speculation = _Record(self._chance)
        return sequence.speculation


def _num_known(chunk: ScheduledChunk) -> int:
    """The tokens of its sequence that are known after it: where the next step runs ahead, a place for that step's token
    is there already."""
    if chunk.drafts:
        return len(chunk.sequence.token_ids)
    return chunk.stop + chunk.samples


def may_be_guessed_for(sequence: SequenceState) -> bool:
    """What is pooled has no next token, and a beam goes on with several."""
    sampling = sequence.sampling
    return (
        sampling.pooling is None
        and not sampling.is_beam
        and not (sampling.prompt_logprobs is not None and sequence.num_computed_tokens < sequence.num_prompt_tokens)
    )
