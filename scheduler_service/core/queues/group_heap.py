"""Waiting groups in an order that can differ from the order of their queue."""

import heapq
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from scheduler_service.core.groups.sequence import SequenceGroup

MAX_STALE = 64  # number of stale entries that are kept, besides one entry for each waiting group

Key = TypeVar("Key", float, tuple[int, int])


class GroupHeap(Generic[Key]):
    """A heap of waiting groups by `key`, the least key first, with lazy removal. Adding a group takes O(log n).

    The heap contains ids and no groups, so that groups that have left the queue can be freed. Reading the first group
    takes O(log n).
    """

    def __init__(self, waiting: Mapping[str, SequenceGroup], key: Callable[[SequenceGroup], Key]) -> None:
        self._waiting = waiting
        self._key: Callable[[SequenceGroup], Key] = key
        self._heap: list[tuple[Key, str]] = []

    def __len__(self) -> int:
        """The number of entries, including entries of groups that have left."""
        return len(self._heap)

    def add(self, group: SequenceGroup) -> None:
        """Add a group that waits from now on."""
        heapq.heappush(self._heap, (self._key(group), group.request_id))
        if len(self._heap) > 2 * len(self._waiting) + MAX_STALE:
            self._heap = [(self._key(waiting), waiting.request_id) for waiting in self._waiting.values()]
            heapq.heapify(self._heap)

    @property
    def first(self) -> SequenceGroup:
        """The group with the least key. At least one group must wait."""
        while True:
            key, request_id = self._heap[0]
            group = self._waiting.get(request_id)
            if group is not None and self._key(group) == key:
                return group
            heapq.heappop(self._heap)

    def pop(self) -> SequenceGroup:
        """Remove the first group until it is added again, and return it. At least one group in the heap must wait."""
        group, entry = self.first, self._heap[0]
        while self._heap and self._heap[0] == entry:  # a group that left and came back has several entries
            heapq.heappop(self._heap)
        return group
