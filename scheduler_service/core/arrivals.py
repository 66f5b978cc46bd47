"""When the earliest of those that wait arrived, whatever the order in which a policy takes them."""

import heapq
from collections.abc import Mapping

from scheduler_service.core.sequence import SequenceGroup

MOST_STALE = 64  # entries, besides as many as there are groups that wait


class Arrivals:
    """A heap with lazy removal: O(log n) to add, and to ask. It holds ids, so that it keeps no group in memory."""

    def __init__(self, waiting: Mapping[str, SequenceGroup]) -> None:
        self._waiting = waiting
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Entries, of which some may be of groups that have left."""
        return len(self._heap)

    def add(self, group: SequenceGroup) -> None:
        """Take note of a group that waits now."""
        heapq.heappush(self._heap, (group.arrived_at, group.request_id))
        if len(self._heap) > 2 * len(self._waiting) + MOST_STALE:
            self._heap = [(waiting.arrived_at, waiting.request_id) for waiting in self._waiting.values()]
            heapq.heapify(self._heap)

    @property
    def earliest(self) -> float:
        """Seconds of the clock that `arrived_at` is told by; at least one group must wait."""
        while True:
            arrived_at, request_id = self._heap[0]
            group = self._waiting.get(request_id)
            if group is not None and group.arrived_at == arrived_at:
                return arrived_at
            heapq.heappop(self._heap)
