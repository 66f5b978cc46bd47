"""The queue of requests that no worker has been given yet. The schedulers of all workers share this queue.

A policy is an order of the waiting queue and a choice of victims. `WaitingQueue` is first come, first served. The other
policies are `PriorityQueue` and `FairQueue`. The balancer decides which worker takes the next group.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.placement.balancer import Balancer
from scheduler_service.core.queues.group_heap import GroupHeap


def insert_by_rank(queue: OrderedDict[str, SequenceGroup], groups: Iterable[SequenceGroup]) -> None:
    """Return groups to the head of a queue, sorted by rank together with the groups at the head."""
    returned = list(groups)
    newest = max(group.rank for group in returned)
    while queue and (first := next(iter(queue.values()))).rank < newest:
        returned.append(queue.pop(first.request_id))
    for group in sorted(returned, key=lambda group: group.rank, reverse=True):
        queue[group.request_id] = group
        queue.move_to_end(group.request_id, last=False)


class WaitingQueue:
    """A queue that is first come, first served. Preempted groups return to the head. Every operation is O(log n) or
    less.

    `balancer` places groups on the workers that share the queue. `live` maps the ids of all requests that have not
    ended, waiting or on any worker, to their adapters. `live_adapters` counts the requests that have not ended, by
    adapter.
    """

    charges = False
    """Whether `charge` must be called for every token."""

    def __init__(self) -> None:
        self.balancer = Balancer()
        self.live: dict[str, str] = {}
        self.live_adapters: Counter[str] = Counter()
        self._groups: OrderedDict[str, SequenceGroup] = OrderedDict()
        self._arrivals = GroupHeap[float](self._groups, lambda group: group.arrived_at)
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._groups

    def __iter__(self) -> Iterator[SequenceGroup]:
        """The waiting groups, in no particular order."""
        return iter(self._groups.values())

    def append(self, group: SequenceGroup) -> None:
        """Add a new group. Raises ValueError if a request with its id waits, runs or is swapped out anywhere."""
        if group.request_id in self.live:
            raise ValueError(
                f"request_id is {group.request_id!r}, and a request of that id waits, runs or is swapped out; "
                "end that one first, or choose another id"
            )
        self.live[group.request_id] = group.adapter_id
        self.live_adapters[group.adapter_id] += 1
        self._groups[group.request_id] = group
        number = next(self._numbers)
        group.rank = (number, number)
        self._arrivals.add(group)

    def put_back(self, groups: SequenceOf[SequenceGroup]) -> None:
        """Return removed groups to the head of the queue, the oldest first."""
        if groups:
            insert_by_rank(self._groups, groups)
            self._note_arrivals(groups)

    def _note_arrivals(self, groups: Iterable[SequenceGroup]) -> None:
        for group in groups:
            self._arrivals.add(group)

    @property
    def earliest_arrival(self) -> float:
        """The least `arrived_at` of all waiting groups. The queue must not be empty."""
        return self._arrivals.first.arrived_at

    @property
    def head(self) -> SequenceGroup:
        """The group that is next. The queue must not be empty."""
        return next(iter(self._groups.values()))

    def upcoming(
        self,
        most: int,
        *,
        equals: bool = True,  # noqa: ARG002
        without: Collection[str] = (),
    ) -> list[SequenceGroup]:
        """The next groups in order, at most `most` groups.

        `equals`: only groups of the same priority as the first group. `without`: lanes to leave out.
        """
        return [] if without else list(itertools.islice(self._groups.values(), most))

    def lane(self, group: SequenceGroup) -> str:  # noqa: ARG002
        """The part of the queue in which a group waits, such as a tenant's. Only a group of another lane can overtake a
        whole lane."""
        return ""

    def get(self, request_id: str) -> SequenceGroup | None:
        return self._groups.get(request_id)

    def remove(self, request_id: str) -> None:
        """Remove a group that a worker takes, from any place in the queue. Does nothing if the group does not wait
        here."""
        self._groups.pop(request_id, None)

    def end(self, request_id: str) -> None:
        """Forget a request that has ended in the queue or on a worker, so that its id can be used again."""
        self.remove(request_id)
        adapter_id = self.live.pop(request_id, None)
        if adapter_id is not None:
            self.live_adapters[adapter_id] -= 1
            if not self.live_adapters[adapter_id]:
                del self.live_adapters[adapter_id]

    def withdraw(self, group: SequenceGroup, status: SequenceStatus, index: int | None = None) -> None:
        """End a waiting group, or only its output `index`. No worker knows the group, so no worker is told."""
        for sequence in group.live:
            if index is None or sequence.index == index:
                sequence.status = status
        if group.is_finished:
            self.end(group.request_id)

    def victim(self, running: dict[SequenceGroup, None]) -> SequenceGroup:
        """The group to preempt if blocks run out: the group that was admitted last."""
        return next(reversed(running))

    def outranks(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:  # noqa: ARG002
        """Whether a waiting group goes before a running or swapped group, so that the running group is preempted."""
        return False

    def charge(self, group: SequenceGroup, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count the service that a group received."""
