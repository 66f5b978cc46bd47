"""Lower numbers run first, and ageing bounds how often anybody is overtaken.

The longer a request has waited, the more later arrivals of a better priority it has let pass; after `overtakes` of them
for each level of difference it goes before the next one. All requests age alike, so their order among each other never
changes, and one number fixed at arrival says it: priority x overtakes + arrival. Of equal ones the older goes first.
"""

import heapq
import itertools
from collections.abc import Sequence as SequenceOf

from scheduler_service.core.queue import WaitingQueue
from scheduler_service.core.sequence import SequenceGroup


class PriorityQueue(WaitingQueue):
    """A heap with lazy removal: O(log n) to append and pop."""

    def __init__(self, overtakes: int = 64) -> None:
        super().__init__()
        self._overtakes = overtakes
        self._heap: list[tuple[tuple[int, int], int, SequenceGroup]] = []
        self._entries = itertools.count()  # so that groups are never compared

    def append(self, group: SequenceGroup) -> None:
        super().append(group)
        arrival = group.rank[1]
        group.rank = (group.priority * self._overtakes + arrival, arrival)
        self._push(group)

    def put_back(self, groups: SequenceOf[SequenceGroup]) -> None:
        for group in groups:
            self._groups[group.request_id] = group
            self._push(group)
        self._note_arrivals(groups)

    @property
    def head(self) -> SequenceGroup:
        while self._groups.get((group := self._heap[0][2]).request_id) is not group:
            heapq.heappop(self._heap)  # it was removed
        return group

    def upcoming(self, most: int) -> list[SequenceGroup]:
        """Those of the head's own priority that come before all others."""
        entries: list[tuple[tuple[int, int], int, SequenceGroup]] = []
        groups: list[SequenceGroup] = []
        while self._heap and len(groups) < most:
            entry = heapq.heappop(self._heap)
            group = entry[2]
            if self._groups.get(group.request_id) is not group or group in groups:
                continue  # it was removed, or put back when an older entry of it was there
            entries.append(entry)
            if groups and group.priority != groups[0].priority:
                break
            groups.append(group)
        for entry in entries:
            heapq.heappush(self._heap, entry)
        return groups

    def victim(self, running: dict[SequenceGroup, None]) -> SequenceGroup:
        """Who would be the last to go first; always the same of any two, or they could preempt each other for ever."""
        return max(running, key=lambda group: group.rank)

    def outranks(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """Only a better priority preempts, and only while age has not evened it out."""
        return waiting.priority < running.priority and waiting.rank < running.rank

    def _push(self, group: SequenceGroup) -> None:
        heapq.heappush(self._heap, (group.rank, next(self._entries), group))
