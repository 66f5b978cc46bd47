"""Waiting groups in an order of their own, which may be another one than that of the queue they wait in."""

import heapq
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from scheduler_service.core.groups.sequence import SequenceGroup

MAX_STALE = 64  # entries, besides as many as there are groups that wait

Key = TypeVar("Key", float, tuple[int, int])


class GroupHeap(Generic[Key]):
    """A heap with lazy removal by `key`, the least first: O(log n) to add, and to ask.

    It holds ids, so that it keeps no group in memory that does not wait any more.
    """

    def __init__(self, waiting: Mapping[str, SequenceGroup], key: Callable[[SequenceGroup], Key]) -> None:
        self._waiting = waiting
        self._key: Callable[[SequenceGroup], Key] = key
        self._heap: list[tuple[Key, str]] = []

    def __len__(self) -> int:
        """Entries, of which some may be of groups that have left."""
        return len(self._heap)

    def add(self, group: SequenceGroup) -> None:
        """Take note of a group that waits now."""
        heapq.heappush(self._heap, (self._key(group), group.request_id))
        if len(self._heap) > 2 * len(self._waiting) + MAX_STALE:
            self._heap = [(self._key(waiting), waiting.request_id) for waiting in self._waiting.values()]
            heapq.heapify(self._heap)

    @property
    def first(self) -> SequenceGroup:
        """The group with the least key; at least one must wait."""
        while True:
            key, request_id = self._heap[0]
            group = self._waiting.get(request_id)
            if group is not None and self._key(group) == key:
                return group
            heapq.heappop(self._heap)

    def pop(self) -> SequenceGroup:
        """Forget the first group until it is added again, and return it; at least one must wait that was not popped."""
        group, entry = self.first, self._heap[0]
        while self._heap and self._heap[0] == entry:  # more than once, if it left and came back
            heapq.heappop(self._heap)
        return group
