"""Decides how many draft tokens each step verifies, by estimates of the probability that a draft is right. The drafter
makes these estimates by comparing earlier drafts with the sampled tokens.
"""

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
    numbers_of_drafts,
)
from worker_service.wording import reason

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Beginning:
    """A request to a proposer: draft up to `number` tokens after the first `num_tokens` tokens of a sequence."""

    sequence: SequenceState
    num_tokens: int
    number: int


class Proposer(Protocol):
    """Proposes draft tokens, for example an n-gram search or a draft model."""

    @property
    def cost(self) -> StepCost | None:
        """The cost of drafting one token for each of several sequences, or None if the cost is negligible.

        If the cost is negligible, tokens are drafted after every step, even if the next step has no room to verify
        them. By these drafts, the drafter measures in every step how often drafts are right.
        """

    def most_behind(self, num_tokens: int) -> int:
        """The maximum number of tokens that the proposer can draft after a sequence's first `num_tokens` tokens."""

    def step_begins(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> None:
        """Prepare for drafting in a step. The drafter calls this method before the device computes the step.

        chunks: the step's chunks, with placeholders for as many drafts as the scheduler allows.
        """

    def propose(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
        """Draft up to `number` tokens for each `Beginning`. Returns one list of draft tokens for each `Beginning`."""


@dataclass(slots=True)
class _Record:
    """The last drafts of one sequence, and estimates of the success of its drafts."""

    chance: float
    """Estimated probability that a draft is right, if all drafts before it in the same step are right."""
    share: float
    """Share of the sequence's steps after which the proposer has found draft tokens."""
    drafted: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Number of tokens that the sequence had when `drafted` was made."""
    wanted: int = 0
    """Number of drafts for which the scheduler should reserve tokens of the sequence's steps, as last reported to the
    scheduler.
    """


class Drafter:
    """Drafts tokens for the sequences of one worker. Only the device thread uses a `Drafter`.

    The method `begins` chooses the drafts that a step verifies, within the room that the scheduler has reserved. The
    method `ends` compares the step's drafts with the tokens that the step has sampled, and requests room for drafts in
    later steps.
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
        """Create the drafter of a worker.

        most: the maximum number of drafts of one sequence in one step. runs_ahead: whether the worker launches steps
        without drafts before the previous step has ended.
        """
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
        """Choose the drafts that a step verifies. Returns the step's chunks with drafts in place of placeholders."""
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
        # The cost of the pause before the step counts as 0, because the worker has already waited and not launched the
        # step early.
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
        """Draft `numbers[i]` tokens after chunk i. In the same passes, a draft model also computes new tokens of
        unfinished prompts.
        """
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
        """Record that launching a step took `seconds`. Before a step with drafts, the device is idle during drafting
        and launching.
        """
        if self._runs_ahead and output.num_draft_tokens:
            waited = self._seconds_after + self._seconds_before + seconds
            self._pause += LEARNING * (waited - self._pause)

    def ends(self, chunks: Sequence[ScheduledChunk], seconds: float) -> list[int]:
        """Learn from a step that has ended. Returns the number of drafts for which the scheduler should reserve tokens
        of later steps, for each sampling sequence. The list is empty if no number has changed.

        chunks: the chunks of the step, with the verified drafts. seconds: the duration of the step.
        """
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
            # If drafts save time for a sequence, room for the maximum number of drafts is requested. The next step may
            # verify fewer drafts.
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
        """Draft tokens after the known tokens of sequences, even if no step will verify the drafts."""
        found = self._propose([Beginning(sequence, num_tokens, self._most) for sequence, num_tokens in ends])
        for (sequence, num_tokens), drafted in zip(ends, found, strict=True):
            record = self._record(sequence)
            record.drafted, record.num_tokens = drafted, num_tokens
            record.share = _observed(record.share, bool(drafted), LEARNING)

    def _propose(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
        try:
            return self._proposer.propose(beginnings)
        # If drafting raises an error, the step must not fail. The worker stops drafting, and continues to compute steps
        # without drafts.
        except Exception as error:
            log.exception("guessing failed, and has ended", reason=reason(error))
            self._has_failed = True
            return [[] for _ in beginnings]

    def _learn(self, sequence: SequenceState, num_tokens: int) -> None:
        """Compare the sampled tokens of a sequence with its drafts, and adjust the estimates of success.

        num_tokens: the number of known tokens of the sequence.
        """
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
    """The number of tokens of a chunk's sequence that are known after the step. If the next step is already launched,
    the sequence ends with a placeholder for that step's token, which is not counted.
    """
    if chunk.drafts:
        return len(chunk.sequence.token_ids)
    num_known = chunk.stop + 1 if chunk.samples else chunk.stop
    return min(num_known, len(chunk.sequence.token_ids))  # a late sequence has gained no token


def may_be_drafted_for(sequence: SequenceState) -> bool:
    """Whether tokens can be drafted for a sequence. A pooled sequence has no next token, and a beam has several next
    tokens.
    """
    sampling = sequence.sampling
    return (
        sampling.pooling is None
        and not sampling.is_beam
        and not (sampling.prompt_logprobs is not None and sequence.num_computed_tokens < sequence.num_prompt_tokens)
    )
