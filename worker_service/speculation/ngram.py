"""Drafts what followed an earlier occurrence of a sequence's last tokens (prompt lookup decoding, Saxena 2023)."""

import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker_service.session.sequence_state import ScheduledChunk
from worker_service.session.step import SchedulerOutput
from worker_service.speculation.drafter import Beginning
from worker_service.speculation.policy import StepCost
from worker_service.speculative_config import FEWEST, MAX


def draft(token_ids: npt.NDArray[np.int64], most: int, fewest: int = FEWEST, longest: int = MAX) -> list[int]:
    """Draft what followed the longest earlier occurrence of the last tokens, and the latest of equally long ones.

    token_ids: [tokens]. Returns `most` tokens, or an empty list if the last `fewest` tokens have not occurred before.
    At most `longest` tokens are compared. At the sequence's end, the draft repeats itself. A call takes 20 µs for 1,000
    tokens, and 70 µs for 100,000."""
    num_tokens = len(token_ids)
    if num_tokens <= fewest or most < 1:
        return []
    ends = np.flatnonzero(token_ids[fewest - 1 : -1] == token_ids[-1]) + fewest - 1
    if not len(ends):
        return []
    for back in range(1, min(longest, num_tokens - 1)):
        longer = ends[ends >= back]
        longer = longer[token_ids[longer - back] == token_ids[-1 - back]]
        if not len(longer):
            if back < fewest:
                return []
            break
        ends = longer
        if len(ends) == 1 and back >= fewest - 1:
            break
    start = int(ends[-1]) + 1
    known: list[int] = token_ids[start : start + most].tolist()
    while len(known) < most:  # past the sequence's end, repeat the draft
        known.append(known[len(known) - (num_tokens - start)])
    return known


class Ngrams:
    """A proposer that searches each sequence for an earlier occurrence of its last tokens."""

    cost: StepCost | None = None

    def __init__(self, fewest: int = FEWEST, longest: int = MAX) -> None:
        """fewest: last tokens that must have occurred before. longest: last tokens to compare at most."""
        self._fewest = fewest
        self._longest = longest

    def most_behind(self, num_tokens: int) -> int:  # noqa: ARG002  # any length can be searched
        return sys.maxsize

    def step_begins(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> None:
        pass

    def propose(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
        bounds = self._fewest, self._longest
        return [
            draft(np.frombuffer(one.sequence.token_ids, dtype=np.int64)[: one.num_tokens], one.number, *bounds)
            for one in beginnings
        ]
