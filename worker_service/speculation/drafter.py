"""What a worker guesses after each step, and what it learns from what came instead.

A guess is made for every sequence that may be guessed for, whether or not it is sent to be verified: comparing it with
the next tokens tells how likely the next ones are to be right.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from worker_service.session.session import ScheduledChunk, SequenceState
from worker_service.speculation import ngram
from worker_service.speculation.policy import FIRST_CHANCE, FIRST_PAUSE, LEARNING, StepCost, numbers_of_guesses


@dataclass(slots=True)
class _Record:
    """Of one sequence: what was guessed last, and the chance that a guess is right if those before it are."""

    chance: float
    guessed: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Of the sequence, when that was guessed."""


class Drafter:
    """Guesses for one worker. Only the device thread uses it."""

    def __init__(self, most: int, prefill_tokens_per_second: int) -> None:
        """most: guesses for one sequence in one step."""
        self._most = most
        self._cost = StepCost(1 / prefill_tokens_per_second if prefill_tokens_per_second else 0.0)
        self._chance = FIRST_CHANCE  # of sequences that nothing is known of
        self._pause = FIRST_PAUSE
        self._has_asked = False  # whether the last answer had guesses, so that the next step waits for this one
        self._answered_at: float | None = None

    def step_begins(self, *, has_drafts: bool) -> None:
        """A step has come; if it verifies guesses, it waited for the answer that brought them."""
        if has_drafts and self._answered_at is not None:
            self._pause += LEARNING * (time.monotonic() - self._answered_at - self._pause)
        self._answered_at = None

    def guess(self, chunks: Sequence[ScheduledChunk], seconds: float) -> Mapping[int, list[int]]:
        """Guesses to verify, by sequence id, after a step of these chunks that took so long; none of most."""
        sampling = [chunk for chunk in chunks if chunk.samples and may_be_guessed_for(chunk.sequence)]
        sequences = [chunk.sequence for chunk in sampling]
        if all(chunk.stop - chunk.start <= 1 + self._most for chunk in chunks):
            self._cost.observe(sum(chunk.stop - chunk.start for chunk in chunks), seconds)
        for chunk in sampling:
            # Where the next step runs ahead, a place for its token is there already.
            self._learn(chunk.sequence, len(chunk.sequence.token_ids) if chunk.drafts else chunk.stop + 1)
        guessing = [sequence for sequence in sequences if self._record(sequence).guessed]
        chances = [self._record(sequence).chance for sequence in guessing]
        others = len(chunks) - len(guessing)
        numbers = numbers_of_guesses(
            chances + [0.0] * others, self._most, self._cost, self._pause, is_late=not self._has_asked
        )
        drafts = {
            sequence.sequence_id: self._record(sequence).guessed[:number]
            for sequence, number in zip(guessing, numbers, strict=False)
            if number
        }
        self._has_asked = bool(drafts)
        if drafts:
            self._answered_at = time.monotonic()
        return drafts

    def _learn(self, sequence: SequenceState, num_tokens: int) -> None:
        """Compare what came with what was guessed, and guess again. num_tokens: those that are known."""
        record = self._record(sequence)
        came = sequence.token_ids[record.num_tokens : num_tokens] if record.guessed else ()
        for guessed, token_id in zip(record.guessed, came, strict=False):
            is_right = guessed == token_id
            record.chance += LEARNING * 2 * (is_right - record.chance)
            self._chance += LEARNING / 4 * (is_right - self._chance)
            if not is_right:
                break
        record.guessed = ngram.guess(np.frombuffer(sequence.token_ids, dtype=np.int64)[:num_tokens], self._most)
        record.num_tokens = num_tokens

    def _record(self, sequence: SequenceState) -> _Record:
        if not isinstance(sequence.speculation, _Record):
            sequence.speculation = _Record(self._chance)
        return sequence.speculation


def may_be_guessed_for(sequence: SequenceState) -> bool:
    """Log-probabilities are reported, and forms followed, one token at a time."""
    sampling = sequence.sampling
    return (
        sampling.logprobs is None
        and not sampling.form
        and not (sampling.prompt_logprobs is not None and sequence.num_computed_tokens < sequence.num_prompt_tokens)
    )
