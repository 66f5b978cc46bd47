"""Decides which draft tokens a step verifies. To estimate the success of later drafts, the drafter compares earlier
drafts with the sampled tokens.
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
    """A sequence's first `num_tokens` tokens, after which a proposer drafts up to `number` tokens."""

    sequence: SequenceState
    num_tokens: int
    number: int


class Proposer(Protocol):
    """Proposes draft tokens, for example an n-gram search or a draft model."""

    @property
    def cost(self) -> StepCost | None:
        """The cost of drafting one token for each of several sequences, or None if the cost is negligible.

        If the cost is negligible, drafts are made after every step, even if the next step has no room for drafts. The
        success of drafts is then measured in every step.
        """

    def most_behind(self, num_tokens: int) -> int:
        """Maximum number of drafts after the first `num_tokens` tokens of a sequence."""

    def step_begins(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> None:
        """Prepare for a step. The drafter calls this method before the device computes the step.

        Each chunk contains at most as many drafts as the scheduler has allowed.
        """

    def propose(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
        """Draft up to `number` tokens after each sequence's beginning. Returns a list of draft tokens for each
        beginning.
        """


@dataclass(slots=True)
class _Record:
    """The drafts of one sequence, and their success."""

    chance: float
    """Probability that a draft is right if all drafts before it are right."""
    share: float
    """Share of the sequence's steps for which the proposer found any draft tokens."""
    drafted: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Number of the sequence's tokens when `drafted` was made."""
    wanted: int = 0
    """Number of drafts for which the sequence's steps should have room, as last reported to the scheduler."""


class Drafter:
    """Drafts tokens for one worker. Only the device thread uses a `Drafter`.

    The method `begins` makes the drafts that are worth verifying in a step with room for drafts. The method `ends`
    compares the step's sampled tokens with its drafts, and requests room for drafts in later steps.
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
        """Create a drafter.

        most: the maximum number of drafts of one sequence in one step. runs_ahead: whether steps without drafts are
        launched before the previous step has ended.
        """
        self._proposer = proposer
        self._most = most
        self._vocabulary_size = vocabulary_size
        self._cost = StepCost(1 / prefill_tokens_per_second if prefill_tokens_per_second else 0.0)
        self._first_chance = FIRST_CHANCE if proposer.cost is None else HOPE
        self._chance = self._first_chance  # a new sequence's chance that a draft is right
        self._runs_ahead = runs_ahead
        self._pause = FIRST_PAUSE if runs_ahead else 0.0
        self._seconds_before = self._seconds_after = 0.0  # seconds of a step in which the drafter computes
        self._has_failed = False

    def begins(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
        """Return the step's chunks with the drafts to verify. In each chunk, drafts replace the placeholders."""
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
        # The pause counts as 0, because this step has already waited for the drafts.
        numbers = numbers_of_drafts(
            [record.chance for record in records], rooms, self._cost, 0.0, drafting=self._proposer.cost
        )
        if self._proposer.cost is not None and any(numbers):
            proposing = time.perf_counter()
            self._propose_in_step(chunks, numbers)
            began += time.perf_counter() - proposing  # the proposer's cost already includes the time of proposing
        drafts = [record.drafted[:number] for record, number in zip(records, numbers, strict=True)]
        self._seconds_before = time.perf_counter() - began
        return [
            chunk.with_drafts(array(TOKENS, takewhile(self._is_token, drafted)))
            for chunk, drafted in zip(chunks, drafts, strict=True)
        ]

    def _propose_in_step(self, chunks: Sequence[ScheduledChunk], numbers: Sequence[int]) -> None:
        """Draft numbers[i] tokens after chunk i. The proposer also computes the new tokens of unfinished prompts."""
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
        """Record the time of launching this step, `seconds`. The device was idle during the launch and the drafting."""
        if self._runs_ahead and output.num_draft_tokens:
            waited = self._seconds_after + self._seconds_before + seconds
            self._pause += LEARNING * (waited - self._pause)

    def ends(self, chunks: Sequence[ScheduledChunk], seconds: float) -> list[int]:
        """Return the number of drafts for which each sampling sequence should have room in later steps. The list is
        empty if no number has changed.

        chunks, seconds: the work and the duration of the step that has ended.
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
            # If drafts save time, room for the maximum number is requested. The next step may verify fewer drafts.
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
        """Draft for sequences after their known tokens, even if the drafts will not be verified."""
        found = self._propose([Beginning(sequence, num_tokens, self._most) for sequence, num_tokens in ends])
        for (sequence, num_tokens), drafted in zip(ends, found, strict=True):
            record = self._record(sequence)
            record.drafted, record.num_tokens = drafted, num_tokens
            record.share = _observed(record.share, bool(drafted), LEARNING)

    def _propose(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
        try:
            return self._proposer.propose(beginnings)
        # An error in drafting must not fail the step, which computes its tokens without drafts.
        except Exception as error:
            log.exception("guessing failed, and has ended", reason=reason(error))
            self._has_failed = True
            return [[] for _ in beginnings]

    def _learn(self, sequence: SequenceState, num_tokens: int) -> None:
        """Compare the sampled tokens with the drafts.

        num_tokens: the number of the sequence's known tokens.
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
    """A moving average of a frequency, after one more observation."""
    return share + rate * ((1.0 if is_so else 0.0) - share)


def _num_known(chunk: ScheduledChunk) -> int:
    """The number of the sequence's known tokens after the chunk. If the next step runs ahead, the sequence already has
    a placeholder for the next step's token, which is not counted.
    """
    if chunk.drafts:
        return len(chunk.sequence.token_ids)
    num_known = chunk.stop + 1 if chunk.samples else chunk.stop
    return min(num_known, len(chunk.sequence.token_ids))  # a sequence whose mask was late has gained no token


def may_be_drafted_for(sequence: SequenceState) -> bool:
    """Whether drafts are possible. A pooled sequence has no next token, and a beam has several next tokens."""
    sampling = sequence.sampling
    return (
        sampling.pooling is None
        and not sampling.is_beam
        and not (sampling.prompt_logprobs is not None and sequence.num_computed_tokens < sequence.num_prompt_tokens)
    )
