"""The queue of requests that wait for a worker. The schedulers of all workers share this queue.

A policy decides the order of the waiting queue, and which running group is preempted. `WaitingQueue` has the policy
first come, first served. The other policies are `PriorityQueue` and `FairQueue`. The balancer decides which worker
takes the next group.
"""

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Generic, TypeVar

from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.placement.balancer import Balancer

MAX_STALE = 64  # number of stale heap entries that are kept, besides one entry for each waiting group

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
        """The number of heap entries, including stale entries of groups that have left the queue."""
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
        """Remove the first group and return it; the caller may add the group again. At least one group in the heap must
        wait."""
        group, entry = self.first, self._heap[0]
        while self._heap and self._heap[0] == entry:  # a group that left and came back has several heap entries
            heapq.heappop(self._heap)
        return group


def insert_by_rank(queue: OrderedDict[str, SequenceGroup], groups: Iterable[SequenceGroup]) -> None:
    """Return groups to the head of a queue, merged by rank with the groups there."""
    returned = list(groups)
    newest = max(group.rank for group in returned)
    while queue and (first := next(iter(queue.values()))).rank < newest:
        returned.append(queue.pop(first.request_id))
    for group in sorted(returned, key=lambda group: group.rank, reverse=True):
        queue[group.request_id] = group
        queue.move_to_end(group.request_id, last=False)


class WaitingQueue:
    """A waiting queue that is first come, first served. Preempted groups return to the head of the queue. Every
    operation is O(log n) or less.

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
        """Add a new group. Raises ValueError if a request with the same id waits, runs or is swapped out anywhere."""
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
        """The earliest arrival time of all waiting groups. The queue must not be empty."""
        return self._arrivals.first.arrived_at

    @property
    def head(self) -> SequenceGroup:
        """The next group in the order of the policy. The queue must not be empty."""
        return next(iter(self._groups.values()))

    def upcoming(
        self,
        most: int,
        *,
        equals: bool = True,  # noqa: ARG002
        without: Collection[str] = (),
    ) -> list[SequenceGroup]:
        """The next groups in order, at most `most` groups.

        `equals` restricts the result to groups of the same priority as the first group. `without` contains lanes whose
        groups are left out.
        """
        return [] if without else list(itertools.islice(self._groups.values(), most))

    def lane(self, group: SequenceGroup) -> str:  # noqa: ARG002
        """The lane of a group: a part of the queue, such as the groups of one tenant. If all groups of a lane are
        passed over, only groups of other lanes can be next."""
        return ""

    def get(self, request_id: str) -> SequenceGroup | None:
        return self._groups.get(request_id)

    def remove(self, request_id: str) -> None:
        """Remove a group that a worker takes, from any place in the queue. Does nothing if the group does not wait in
        this queue."""
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
        """End a waiting group, or only its output `index`. A waiting group is on no worker, so no worker must be
        told."""
        for sequence in group.live:
            if index is None or sequence.index == index:
                sequence.status = status
        if group.is_finished:
            self.end(group.request_id)

    def victim(self, running: dict[SequenceGroup, None]) -> SequenceGroup:
        """The group to preempt if blocks run out: the group that was admitted last."""
        return next(reversed(running))

    def outranks(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:  # noqa: ARG002
        """Whether a waiting group goes before a running or swapped group, so that the running group is preempted for
        it."""
        return False

    def charge(self, group: SequenceGroup, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count tokens as service that the group's tenant received."""
