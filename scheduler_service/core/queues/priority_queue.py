"""Lower numbers run first, and ageing bounds how often a request is overtaken.

The longer a request has waited, the more later arrivals of a better priority it has let pass; after `overtakes` of them
for each level of difference it goes before the next one. All requests age alike, so their order among each other never
changes, and one number fixed at arrival says it: priority x overtakes + arrival. Of equal ones the older goes first.
"""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.queues.group_heap import GroupHeap
from scheduler_service.core.queues.waiting_queue import WaitingQueue


class PriorityQueue(WaitingQueue):
    """O(log n) to append and pop."""

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
        """With `equals` those of the head's own priority that come before all others."""
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
        """The last in rank; of any two always the same one, or they could preempt each other for ever."""
        return max(running, key=lambda group: group.rank)

    def outranks(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:
        """Only a better priority preempts, and only while age has not evened it out."""
        return waiting.priority < running.priority and waiting.rank < running.rank
