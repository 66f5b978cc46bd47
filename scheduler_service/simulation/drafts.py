"""Counts drafts in a recording, and draws drafts at random in a simulation."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from random import Random

from scheduler_service.core import ModelOutput, SchedulerOutput


@dataclass(slots=True)
class _Position:
    """Drafts at one position after the last known token."""

    made: int = 0
    reached: int = 0
    """Drafts whose predecessors in the step were all accepted."""
    right: int = 0


class DraftCounts:
    def __init__(self) -> None:
        self._num_decodes = 0
        self._positions: list[_Position] = []

    def add(self, output: SchedulerOutput, verified: Sequence[int], gained: Sequence[int]) -> None:
        """Count a step's verified drafts and new tokens, by sequence that sampled. Empty lists: no drafts, one token
        each.
        """
        sampled = [(sequence, num_tokens) for sequence, num_tokens, samples in output.scheduled if samples]
        numbers = zip(verified or [0] * len(sampled), gained or [1] * len(sampled), strict=True)
        for (sequence, num_tokens), (num_drafts, num_gained) in zip(sampled, numbers, strict=True):
            if num_tokens != 1 + output.num_draft_tokens.get(sequence, 0):  # the chunk is the end of a prompt
                continue
            self._num_decodes += 1
            self._positions += [_Position() for _ in range(num_drafts - len(self._positions))]
            for number, position in enumerate(self._positions[:num_drafts]):
                position.made += 1
                position.reached += num_gained > number
                position.right += num_gained > number + 1

    @property
    def fields(self) -> dict[str, list[float]]:
        """The fields of `CostModel`; empty without drafts."""
        if not self._positions:
            return {}
        return {
            "guesses": [position.made / self._num_decodes for position in self._positions],
            "acceptance": [position.right / max(1, position.reached) for position in self._positions],
        }


class Drafting:
    """Drafts of simulated workers, equal in every run of a trace and policy."""

    def __init__(self, shares: Sequence[float], acceptance: Sequence[float]) -> None:
        """The fields `guesses` and `acceptance` of `CostModel`."""
        self._shares = shares
        self._acceptance = acceptance
        self._random = Random(0).random

    def make(self, output: SchedulerOutput) -> list[int]:
        """Drafts of each sequence that samples, at most the scheduler's room."""
        rooms = (output.num_draft_tokens.get(sequence, 0) for sequence, _, samples in output.scheduled if samples)
        return [min(room, self._number()) if room else 0 for room in rooms]

    def answer(self, output: SchedulerOutput, verified: list[int], token: int) -> ModelOutput:
        """A step's answer: drafts up to the first wrong one, and one more token. Each sequence asks for the most drafts
        next.
        """
        gained = [1 + sum(1 for _ in takewhile(self._is_right, self._acceptance[:number])) for number in verified]
        wanted = [len(self._shares)] * len(verified)
        return ModelOutput(
            output.step_id,
            [token] * sum(gained),
            gained,
            num_draft_tokens=verified,
            num_draft_tokens_wanted=wanted,
        )

    def _number(self) -> int:
        at = self._random()
        return sum(share > at for share in self._shares)

    def _is_right(self, chance: float) -> bool:
        return self._random() < chance
