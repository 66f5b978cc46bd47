"""Counts made and accepted draft tokens in a recording, and draws draft tokens at random in a simulation."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from random import Random

from scheduler_service.core import ModelOutput, SchedulerOutput


@dataclass(slots=True)
class _Position:
    """Counts of the drafts at one position after the last known token."""

    made: int = 0
    reached: int = 0
    """Number of drafts at this position for which all earlier drafts of the step were accepted."""
    right: int = 0


class DraftCounts:
    """Counts of a worker's drafts by position."""

    def __init__(self) -> None:
        self._num_decodes = 0
        self._positions: list[_Position] = []

    def add(self, output: SchedulerOutput, verified: Sequence[int], gained: Sequence[int]) -> None:
        """Count a step: the verified drafts and the new tokens of each sequence that sampled.

        If both lists are empty, each sequence had no drafts and gained one token.
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
        """The fields of `CostModel` about drafts. The result is empty if the steps had no drafts."""
        if not self._positions:
            return {}
        return {
            "guesses": [position.made / self._num_decodes for position in self._positions],
            "acceptance": [position.right / max(1, position.reached) for position in self._positions],
        }


class Drafting:
    """The drafts of simulated workers. Random draws are equal in every run of the same trace and policy."""

    def __init__(self, shares: Sequence[float], acceptance: Sequence[float]) -> None:
        """`shares` and `acceptance` are the fields `guesses` and `acceptance` of `CostModel`."""
        self._shares = shares
        self._acceptance = acceptance
        self._random = Random(0).random

    def make(self, output: SchedulerOutput) -> list[int]:
        """The number of drafts to verify for each sequence that samples. The scheduler's room for drafts
        (`num_lookahead_slots`) limits this number.
        """
        rooms = (output.num_draft_tokens.get(sequence, 0) for sequence, _, samples in output.scheduled if samples)
        return [min(room, self._number()) if room else 0 for room in rooms]

    def answer(self, output: SchedulerOutput, verified: list[int], token: int) -> ModelOutput:
        """The answer to a step: each sequence gains its drafts before the first wrong draft, and one more token.

        For every sequence, the answer asks for room for the largest possible number of drafts in the next step.
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
