"""Runs of cached blocks that were found in a step, so that requests with the same prefix need no second lookup.

A key stands for all tokens up to its block's end. If two prompts have the same key at one index, all their earlier keys
are the same too, so bisection finds their common prefix.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from scheduler_service.core.blocks.allocator import BlockAllocator


class Run(NamedTuple):
    end: int
    """First index whose key finds no block."""
    num_looked_up: int
    """Number of keys that were looked up or compared."""


class FoundRuns:
    """The runs of cached blocks that were found in one step. Runs are not kept for the next step, because the keys of a
    prompt can change. If a block can no longer be found, all runs are forgotten."""

    def __init__(self, blocks: BlockAllocator) -> None:
        self._blocks = blocks
        self._num_lost = blocks.num_lost
        self._runs: dict[bytes, tuple[Sequence[bytes], int]] = {}

    def find(self, keys: Sequence[bytes], start: int, end: int) -> Run:
        """The run of cached blocks that begins at index `start` and ends at index `end` at the latest."""
        if self._num_lost != self._blocks.num_lost:
            self._num_lost = self._blocks.num_lost
            self._runs.clear()
        if start >= end:
            return Run(start, 0)
        known, known_end = self._runs.get(keys[start], ((), start))
        common = range(start, min(end, known_end))
        begin = start + bisect_left(common, True, key=lambda place: keys[place] != known[place])
        stop = self._blocks.end_of_run(keys, begin, end)
        if stop > known_end:
            self._runs[keys[start]] = keys, stop
        return Run(stop, len(common).bit_length() + stop - begin + 1)
