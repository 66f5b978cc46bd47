"""Lower priority numbers run first, and ageing limits how often a request is overtaken.

A later request of a better priority can overtake a waiting request. For each level of difference between the two
priorities, only the next `overtakes` arrivals after the waiting request can overtake it. All requests age at the same
speed, so the order of two requests never changes. Requests are sorted by a number that is fixed at arrival: priority x
overtakes + arrival number. If this number is equal for two requests, the older request goes first.
"""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.queues.waiting_queue import GroupHeap, WaitingQueue


class PriorityQueue(WaitingQueue):
    """A waiting queue that is sorted by priority and age. Appending and removing take O(log n)."""

    def __init__(self, overtakes: int = 64) -> None:
        super().__init__()
        self._overtakes = overtakes
        self._ranks = GroupHeap[tuple[int, int]](self._groups, lambda group: group.rank)

    def append(self, group: SequenceGroup) -> None:
        super().append(group)
        arrival = group.rank[1]
        group.rank = (group.priority * self._overtakes + arrival, arrival)
        self._ranks.add(group)

    def put_back(self, groups: SequenceOf[SequenceGroup]) -> None:
        for group in groups:
            self._groups[group.request_id] = group
            self._ranks.add(group)
        self._note_arrivals(groups)

    @property
    def head(self) -> SequenceGroup:
        return self._ranks.first

    def upcoming(self, most: int, *, equals: bool = True, without: Collection[str] = ()) -> list[SequenceGroup]:
        """The next groups in order. With `equals`, the list ends before the first group of another priority."""
        groups: list[SequenceGroup] = []
        if without:
            return groups
        while len(groups) < min(most, len(self._groups)) and (
            not equals or not groups or self._ranks.first.priority == groups[0].priority
        ):
            groups.append(self._ranks.pop())
        for group in groups:
            self._ranks.add(group)
        return groups

    def victim(self, running: dict[SequenceGroup, None]) -> SequenceGroup:
        """The running group that ranks last. The ranks of two groups never change, so the two cannot preempt each other
        for ever."""
        return max(running, key=lambda group: group.rank)

    def outranks(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """Whether the waiting group has a better priority, and the running group's age does not make up for the
        difference."""
        return waiting.priority < running.priority and waiting.rank < running.rank
