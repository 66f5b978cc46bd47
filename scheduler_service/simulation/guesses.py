"""Guesses at next tokens: how often they come and are right, counted in a recording and drawn in a simulation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from random import Random

from scheduler_service.core import SchedulerOutput


@dataclass(slots=True)
class _Position:
    """Of guesses at one place behind the last known token."""

    made: int = 0
    reached: int = 0
    """After others that were right."""
    right: int = 0


class GuessCounts:
    """What became of a worker's guesses."""

    def __init__(self) -> None:
        self._num_decodes = 0
        self._positions: list[_Position] = []

    def add(self, output: SchedulerOutput, num_gained: Sequence[int]) -> None:
        """Count a step. num_gained: tokens of each sequence that sampled; empty if each gained one."""
        sampled = [(sequence, num_tokens) for sequence, num_tokens, samples in output.scheduled if samples]
        for (sequence, num_tokens), gained in zip(sampled, num_gained or [1] * len(sampled), strict=True):
            num_guesses = len(output.draft_tokens.get(sequence.id, ()))
            if num_tokens != 1 + num_guesses:  # the end of a prompt
                continue
            self._num_decodes += 1
            self._positions += [_Position() for _ in range(num_guesses - len(self._positions))]
            for number, position in enumerate(self._positions[:num_guesses]):
                position.made += 1
                position.reached += gained > number
                position.right += gained > number + 1

    @property
    def fields(self) -> dict[str, list[float]]:
        """As `CostModel` has them; empty without guesses."""
        if not self._positions:
            return {}
        return {
            "guesses": [position.made / self._num_decodes for position in self._positions],
            "acceptance": [position.right / max(1, position.reached) for position in self._positions],
        }


class Guessing:
    """The guesses of simulated workers. What is drawn is the same in every run of the same trace and policy."""

    def __init__(self, shares: Sequence[float], acceptance: Sequence[float]) -> None:
        """As `CostModel` has them."""
        self._shares = shares
        self._acceptance = acceptance
        self._random = Random(0).random

    def verify(self, output: SchedulerOutput) -> list[int]:
        """How many tokens each sequence gains that samples: its guesses up to the first wrong one, and one more."""
        numbers = (
            len(output.draft_tokens.get(sequence.id, ())) for sequence, _, samples in output.scheduled if samples
        )
        return [1 + sum(1 for _ in takewhile(self._is_right, self._acceptance[:number])) for number in numbers]

    def _is_right(self, chance: float) -> bool:
        return self._random() < chance

    def next(self, output: SchedulerOutput, token: int) -> Mapping[int, list[int]]:
        """Guesses for the sequences that go on after this step, by sequence id: some of `token`."""
        drawn = (
            (sequence.id, self._random())
            for sequence, _, samples in output.scheduled
            if samples and not sequence.status.is_finished
        )
        return {sequence_id: [token] * sum(share > at for share in self._shares) for sequence_id, at in drawn}
