"""Decides how many drafts each step verifies, by how often earlier drafts were right."""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import structlog

from worker_service.session.sequence_state import NO_DRAFTS, ScheduledChunk, SequenceState
from worker_service.session.step import TOKENS, SchedulerOutput
from worker_service.speculation.policy import (
    FIRST_CHANCE,
    FIRST_PAUSE,
    FIRST_SHARE,
    FORGETTING,
    HOPE,
    LEARNING,
    StepCost,
    numbers_of_drafts,
)
from worker_service.wording import reason

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Beginning:
    """A request to a proposer: up to `number` drafts after the first `num_tokens` tokens."""

    sequence: SequenceState
    num_tokens: int
    number: int


class Proposer(Protocol):
    """Proposes drafts, for example by an n-gram search or a draft model."""

    @property
    def cost(self) -> StepCost | None:
        """The cost of one draft for each of several sequences, or None if negligible.

        With negligible cost, tokens are drafted after every step, even without room to verify them, to measure how
        often drafts are right."""

    def most_behind(self, num_tokens: int) -> int:
        """Maximum drafts after a sequence's first `num_tokens` tokens."""

    def step_begins(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> None:
        """Called before the device computes a step. chunks: with placeholders for drafts."""

    def propose(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
        """One list of drafts for each `Beginning`."""


@dataclass(slots=True)
class _Record:
    chance: float
    """Estimated probability that a draft is right, if the drafts before it are right."""
    share: float
    """Share of steps after which the proposer has found drafts."""
    drafted: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens of the sequence when `drafted` was made."""
    wanted: int = 0
    """Drafts for which the scheduler should reserve tokens, as last reported."""


class Drafter:
    """Drafts tokens for the sequences of one worker, on the device thread. `begins` chooses the drafts that a step
    verifies; `ends` learns from the sampled tokens, and requests room for drafts."""

    def __init__(
        self,
        proposer: Proposer,
        most: int,
        vocabulary_size: int,
        prefill_tokens_per_second: int,
        *,
        runs_ahead: bool = False,
    ) -> None:
        """most: maximum drafts of one sequence in one step. runs_ahead: whether steps without drafts are launched
        early."""
        self._proposer = proposer
        self._most = most
        self._vocabulary_size = vocabulary_size
        self._cost = StepCost(1 / prefill_tokens_per_second if prefill_tokens_per_second else 0.0)
        self._first_chance = FIRST_CHANCE if proposer.cost is None else HOPE
        self._chance = self._first_chance  # first `chance` of new sequences
        self._runs_ahead = runs_ahead
        self._pause = FIRST_PAUSE if runs_ahead else 0.0
        self._seconds_before = self._seconds_after = 0.0  # durations of `begins` and `ends`
        self._has_failed = False

    def begins(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
        """Returns the step's chunks with drafts in place of placeholders."""
        if self._has_failed:
            return [chunk.with_drafts(NO_DRAFTS) for chunk in chunks]
        self._proposer.step_begins(output, chunks)
        if not output.num_draft_tokens:
            return list(chunks)
        began = time.perf_counter()
        records = [self._record(chunk.sequence) for chunk in chunks]
        rooms = [len(chunk.drafts) if may_be_drafted_for(chunk.sequence) else 0 for chunk in chunks]
        for row, (chunk, record) in enumerate(zip(chunks, records, strict=True)):
            num_known = chunk.start + 1
            if self._proposer.cost is None:
                is_current = record.num_tokens == num_known
                rooms[row] = min(rooms[row], len(record.drafted)) if is_current else 0
            elif rooms[row]:
                rooms[row] = min(rooms[row], self._proposer.most_behind(num_known))
        # The pause counts as 0 here, because the step was not launched early anyway.
        numbers = numbers_of_drafts(
            [record.chance for record in records], rooms, self._cost, 0.0, drafting=self._proposer.cost
        )
        if self._proposer.cost is not None and any(numbers):
            proposing = time.perf_counter()
            self._propose_in_step(chunks, numbers)
            began += time.perf_counter() - proposing  # this time is part of the proposer's cost
        drafts = [record.drafted[:number] for record, number in zip(records, numbers, strict=True)]
        self._seconds_before = time.perf_counter() - began
        return [
            chunk.with_drafts(array(TOKENS, takewhile(self._is_token, drafted)))
            for chunk, drafted in zip(chunks, drafts, strict=True)
        ]

    def _propose_in_step(self, chunks: Sequence[ScheduledChunk], numbers: Sequence[int]) -> None:
        """Draft `numbers[i]` tokens after chunk i. The same passes compute new tokens of unfinished prompts."""
        beginnings = [
            Beginning(chunk.sequence, chunk.start + 1, number)
            for chunk, number in zip(chunks, numbers, strict=True)
            if may_be_drafted_for(chunk.sequence) and self._proposer.most_behind(chunk.start + 1)
        ]
        for one, drafted in zip(beginnings, self._propose(beginnings), strict=True):
            record = self._record(one.sequence)
            record.drafted, record.num_tokens = drafted, one.num_tokens

    def _is_token(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocabulary_size

    def launched(self, output: SchedulerOutput, seconds: float) -> None:
        """Record the seconds of a launch: the device is idle while a step with drafts is drafted and launched."""
        if self._runs_ahead and output.num_draft_tokens:
            waited = self._seconds_after + self._seconds_before + seconds
            self._pause += LEARNING * (waited - self._pause)

    def ends(self, chunks: Sequence[ScheduledChunk], seconds: float) -> list[int]:
        """Learn from a step. Returns the drafts for which the scheduler should reserve tokens, for each sampling
        sequence; empty if unchanged.

        chunks: with the verified drafts. seconds: the step's duration."""
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
            going_on = [chunk.samples and may_be_drafted_for(chunk.sequence) for chunk in chunks]
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
            numbers = numbers_of_drafts(
                [record.chance for record in records],
                mosts,
                self._cost,
                self._pause,
                shares=[record.share for record in records],
                drafting=self._proposer.cost,
            )
            # Where drafts pay, room for the maximum is requested. The next step may verify fewer.
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
        """Draft after the known tokens, even if no step will verify the drafts."""
        found = self._propose([Beginning(sequence, num_tokens, self._most) for sequence, num_tokens in ends])
        for (sequence, num_tokens), drafted in zip(ends, found, strict=True):
            record = self._record(sequence)
            record.drafted, record.num_tokens = drafted, num_tokens
            record.share = _observed(record.share, bool(drafted), LEARNING)

    def _propose(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
        try:
            return self._proposer.propose(beginnings)
        # The step must not fail: the worker continues without drafts.
        except Exception as error:
            log.exception("drafting failed, and has ended", reason=reason(error))
            self._has_failed = True
            return [[] for _ in beginnings]

    def _learn(self, sequence: SequenceState, num_tokens: int) -> None:
        """Compare sampled tokens with drafts, and adjust the estimates. num_tokens: known tokens of the sequence."""
        record = self._record(sequence)
        came = sequence.token_ids[record.num_tokens : num_tokens] if record.drafted else ()
        for drafted, token_id in zip(record.drafted, came, strict=False):
            is_right = drafted == token_id
            record.chance = _observed(record.chance, is_right, LEARNING * 2)
            self._chance = _observed(self._chance, is_right, LEARNING / 4)
            if not is_right:
                break
        if self._proposer.cost is not None and not record.drafted:
            record.chance += FORGETTING * (self._first_chance - record.chance)
            self._chance += FORGETTING / 4 * (self._first_chance - self._chance)
        record.drafted = []

    def _record(self, sequence: SequenceState) -> _Record:
        if not isinstance(sequence.speculation, _Record):
            sequence.speculation = _Record(self._chance, 1.0 if self._proposer.cost is not None else FIRST_SHARE)
        return sequence.speculation


def _observed(share: float, is_so: bool, rate: float) -> float:
    """The moving average `share` of a frequency, after one more observation."""
    return share + rate * ((1.0 if is_so else 0.0) - share)


def _num_known(chunk: ScheduledChunk) -> int:
    """Tokens of a chunk's sequence that are known after the step. The placeholder of a step launched ahead does not
    count."""
    if chunk.drafts:
        return len(chunk.sequence.token_ids)
    num_known = chunk.stop + 1 if chunk.samples else chunk.stop
    return min(num_known, len(chunk.sequence.token_ids))  # a late sequence has gained no token


def may_be_drafted_for(sequence: SequenceState) -> bool:
    """A pooled sequence has no next token, and a beam has several."""
    sampling = sequence.sampling
    return (
        sampling.pooling is None
        and not sampling.is_beam
        and not (sampling.prompt_logprobs is not None and sequence.num_computed_tokens < sequence.num_prompt_tokens)
    )
