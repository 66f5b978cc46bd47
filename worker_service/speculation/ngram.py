"""Drafts the continuation of an earlier occurrence of the last tokens (prompt lookup decoding, Saxena 2023)."""

import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker_service.session.session import ScheduledChunk
from worker_service.session.step import SchedulerOutput
from worker_service.speculation.drafter import Beginning
from worker_service.speculation.policy import StepCost

FEWEST = 2
"""Fewest tokens that an earlier occurrence must match: a single token has nearly always occurred before."""
MOST = 16
"""Most tokens that are compared: longer matches are not better."""


def draft(token_ids: npt.NDArray[np.int64], most: int) -> list[int]:
    """The draft of the next tokens: the continuation of the latest of the longest earlier occurrences.

    token_ids: [tokens]. Returns `most` tokens, or none if the last `FEWEST` have not occurred before. A repetition is
    drafted to continue. 20 µs for 1,000 tokens, 70 µs for 100,000.
    """
    num_tokens = len(token_ids)
    if num_tokens <= FEWEST or most < 1:
        return []
    ends = np.flatnonzero(token_ids[FEWEST - 1 : -1] == token_ids[-1]) + FEWEST - 1
    for back in range(1, min(MOST, num_tokens - 1)):
        longer = ends[ends >= back]
        longer = longer[token_ids[longer - back] == token_ids[-1 - back]]
        if not len(longer):
            if back < FEWEST:
                return []
            break
        ends = longer
        if len(ends) == 1:
            break
    start = int(ends[-1]) + 1
    known: list[int] = token_ids[start : start + most].tolist()
    while len(known) < most:  # continues with the draft itself
        known.append(known[len(known) - (num_tokens - start)])
    return known


class Ngrams:
    """A proposer that looks for each sequence's last tokens in the sequence itself."""

    cost: StepCost | None = None

    def most_behind(self, num_tokens: int) -> int:  # noqa: ARG002  # it reads any length
        return sys.maxsize

    def step_begins(self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> None:
        pass

    def propose(self, beginnings: Sequence[Beginning]) -> list[list[int]]:
        return [
            draft(np.frombuffer(one.sequence.token_ids, dtype=np.int64)[: one.num_tokens], one.number)
            for one in beginnings
        ]
