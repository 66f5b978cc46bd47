"""Lower numbers run first, and ageing bounds how often anybody is overtaken.

The longer a request has waited, the more later arrivals of a better priority it has let pass; after `overtakes` of them
for each level of difference it goes before the next one. All requests age alike, so their order among each other never
changes, and one number fixed at arrival says it: priority x overtakes + arrival.
"""

import heapq
import itertools
from collections.abc import Iterable

from scheduler_service.core.queue import WaitingQueue
from scheduler_service.core.sequence import SequenceGroup


class PriorityQueue(WaitingQueue):
    """A heap with lazy removal: O(log n) to append and pop."""

    def __init__(self, overtakes: int = 64) -> None:
        super().__init__()
        self._overtakes = overtakes
        self._arrivals = itertools.count()
        self._heap: list[tuple[int, int, SequenceGroup]] = []
        self._entries = itertools.count()  # breaks ties that put_back can make

    def append(self, group: SequenceGroup) -> None:
        super().append(group)
        group.rank = group.priority * self._overtakes + next(self._arrivals)
        self._push(group)

    def put_back(self, groups: Iterable[SequenceGroup]) -> None:
        for group in groups:
            self._groups[group.request_id] = group
            self._push(group)

    @property
    def head(self) -> SequenceGroup:
        while self._groups.get((group := self._heap[0][2]).request_id) is not group:
            heapq.heappop(self._heap)  # it was removed
        return group

    def pop(self) -> SequenceGroup:
        group = self.head
        heapq.heappop(self._heap)
        del self._groups[group.request_id]
        return group

    def victim(self, running: dict[SequenceGroup, None]) -> SequenceGroup:
        """Of the lowest priority the youngest, and of equal ranks the one admitted last, or two would take turns."""
        return max(reversed(running), key=lambda group: group.rank)

    def outranks(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """Only a better priority preempts, and only while age has not evened it out."""
        return waiting.priority < running.priority and waiting.rank < running.rank

    def _push(self, group: SequenceGroup) -> None:
        heapq.heappush(self._heap, (group.rank, next(self._entries), group))
