"""The runs of cached blocks that a step has found."""

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from scheduler_service.core.blocks.allocator import BlockAllocator


class Run(NamedTuple):
    end: int
    """First index whose key finds no block."""
    num_looked_up: int
    """Keys that were looked up or compared."""


class FoundRuns:
    """The runs of cached blocks that were found in one step, so that an equal prefix is not looked up again.

    If two prompts have the same key at one index, all earlier keys are equal, so bisection finds the common prefix.
    """

    def __init__(self, blocks: BlockAllocator) -> None:
        self._blocks = blocks
        self._num_lost = blocks.num_lost
        self._runs: dict[bytes, tuple[SequenceOf[bytes], int]] = {}

    def find(self, keys: SequenceOf[bytes], start: int, end: int) -> Run:
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
