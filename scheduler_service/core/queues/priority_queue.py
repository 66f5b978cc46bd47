"""Lower priority numbers run first, and ageing limits how often a request is overtaken.

For each level of difference in priority, only the next `overtakes` arrivals can overtake a waiting request. All
requests age at the same speed, so their order is fixed at arrival: priority x overtakes + arrival number, the older
first.
"""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.queues.waiting_queue import GroupHeap, WaitingQueue


class PriorityQueue(WaitingQueue):
    """Appending and removing take O(log n)."""

    reads_priority = True

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
        """With `equals`, the list ends before the first group of another priority."""
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
        """The running group that ranks last. Ranks never change, so two groups cannot preempt each other for ever."""
        return max(running, key=lambda group: group.rank)

    def outranks(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """Whether the waiting group has a better priority that the running group's age does not make up for."""
        return waiting.priority < running.priority and waiting.rank < running.rank
