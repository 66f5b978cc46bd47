"""The queue of requests that wait, shared by the schedulers of all workers, and one step's view of the queue.

`WaitingQueue` serves first come, first served; `PriorityQueue` and `FairQueue` have other orders. The balancer decides
which worker takes the next group.
"""

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Generic, TypeVar

from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.placement.balancer import MAX_OVERTAKES, Balancer
from scheduler_service.core.placement.choice import Placement

MAX_STALE = 64  # stale entries that the heap may hold, in addition to as many as there are waiting groups

MAX_LEFT = 8  # Groups that a step passes over for other workers, …
MAX_SLOTLESS = 32  # … without an adapter slot, …
MAX_AWAITING = 256  # … for adapters that are not held, …
MAX_SHARING = 256  # … and, in one lane, for a prefix.

Key = TypeVar("Key", float, tuple[int, int])


class GroupHeap(Generic[Key]):
    """A heap of waiting groups by `key`, with lazy removal; all operations take O(log n). The heap contains ids, so
    that groups that have left can be freed."""

    def __init__(self, waiting: Mapping[str, SequenceGroup], key: Callable[[SequenceGroup], Key]) -> None:
        self._waiting = waiting
        self._key: Callable[[SequenceGroup], Key] = key
        self._heap: list[tuple[Key, str]] = []

    def __len__(self) -> int:
        """Entries, including stale entries of groups that have left the queue."""
        return len(self._heap)

    def add(self, group: SequenceGroup) -> None:
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
        group, entry = self.first, self._heap[0]
        while self._heap and self._heap[0] == entry:  # a group that came back has several entries
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
    """First come, first served; preempted groups return to the head. Every operation is O(log n) or less. `live` maps
    the ids of all requests that have not ended, anywhere, to their adapters."""

    charges = False
    """Whether `charge` must be called for every token."""
    reads_priority = False
    """Whether requests may have a `priority`; otherwise one that is not 0 is refused."""

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
                f"request_id is {group.request_id!r}, and a request with this id waits, runs or is swapped out; "
                "end the other request first, or choose another id"
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
        """Earliest arrival time of all waiting groups. The queue must not be empty."""
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
        """The next groups in order, at most `most`. `equals`: only groups of the first group's priority. `without`:
        lanes that are left out."""
        return [] if without else list(itertools.islice(self._groups.values(), most))

    def lane(self, group: SequenceGroup) -> str:  # noqa: ARG002
        """A part of the queue, such as a tenant's groups. If all groups of a lane are passed over, other lanes go
        on."""
        return ""

    def get(self, request_id: str) -> SequenceGroup | None:
        return self._groups.get(request_id)

    def remove(self, request_id: str) -> None:
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
        """End a waiting group, or only its output `index`. No worker must be told."""
        for sequence in group.live:
            if index is None or sequence.index == index:
                sequence.status = status
        if group.is_finished:
            self.end(group.request_id)

    def victim(self, running: dict[SequenceGroup, None]) -> SequenceGroup:
        """The group to preempt if blocks run out: the group that was admitted last."""
        return next(reversed(running))

    def outranks(self, waiting: SequenceGroup, running: SequenceGroup) -> bool:  # noqa: ARG002
        """Whether a waiting group goes before a running or swapped group."""
        return False

    def charge(self, group: SequenceGroup, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count tokens as service that the group's tenant received."""


class QueueView:
    """One step's view of the waiting queue: which groups are passed over, and which group is next.

    `left`: a better worker is available. `slotless`: the adapter has no free slot; swapped groups can be slotless, too.
    `awaiting`: the adapter must be fetched first. `sharing`: other groups compute the prefix. `held`: suspects that
    must wait, and until when. Groups in `left` and `slotless` are overtaken at most MAX_OVERTAKES times. Groups in
    `awaiting` and `sharing` have no limit, because later groups do not delay their adapter or prefix.
    """

    __slots__ = ("_num_sharing", "_upcoming", "_waiting", "_worker", "awaiting", "held", "left", "sharing", "slotless")

    def __init__(self, waiting: WaitingQueue, worker: str) -> None:
        self._waiting = waiting
        self._worker = worker
        self.left: dict[SequenceGroup, Placement] = {}
        self.slotless: dict[SequenceGroup, None] = {}
        self.awaiting: dict[SequenceGroup, None] = {}
        self.sharing: dict[SequenceGroup, None] = {}
        self._num_sharing: Counter[str] = Counter()  # groups in `sharing`, by lane
        self.held: dict[SequenceGroup, float] = {}
        self._upcoming: list[SequenceGroup] = []  # groups read from the queue, in reverse order

    @property
    def next(self) -> SequenceGroup | None:
        """The first group that is not passed over; None also if no further group may overtake. The queue must not be
        empty."""
        if not (self.left or self.slotless or self.awaiting or self.sharing or self.held):
            return self._waiting.head
        if not self._upcoming:
            if self._is_looked_past_enough:
                return None
            passed = {*self.left, *self.slotless, *self.awaiting, *self.sharing, *self.held}
            most = 2 * len(passed) + 1  # each further query asks for about twice as many
            full = {lane for lane, number in self._num_sharing.items() if number >= MAX_SHARING}
            groups = self._waiting.upcoming(most, equals=bool(self.left), without=full)
            self._upcoming = [group for group in reversed(groups) if group not in passed]
        return self._upcoming[-1] if self._upcoming else None

    @property
    def is_at_head(self) -> bool:
        """Whether the next group overtakes no group."""
        return not self.left and not self.slotless

    @property
    def overtaken(self) -> list[SequenceGroup]:
        return [*self.left, *self.slotless]

    @property
    def is_slotless_overdue(self) -> bool:
        return any(group.placement.num_overtaken >= MAX_OVERTAKES for group in self.slotless)

    @property
    def _is_looked_past_enough(self) -> bool:
        return (
            len(self.left) > MAX_LEFT
            or any(
                group.placement.num_overtaken >= MAX_OVERTAKES and self._worker not in group.lost_on
                for group in self.left
            )
            or self.is_slotless_overdue
        )

    def leave(self, placement: Placement) -> None:
        self.left[placement.group] = placement
        self.renew()  # from now on, only groups of equal priority may overtake

    def pass_slotless(self, group: SequenceGroup) -> bool:
        """Pass over a group without an adapter slot. Returns whether the group was passed over."""
        return group.placement.num_overtaken < MAX_OVERTAKES and self._pass_into(self.slotless, group, MAX_SLOTLESS)

    def pass_awaiting(self, group: SequenceGroup) -> bool:
        return self._pass_into(self.awaiting, group, MAX_AWAITING)

    def pass_sharing(self, group: SequenceGroup) -> None:
        self._pass(self.sharing, group)
        lane = self._waiting.lane(group)
        self._num_sharing[lane] += 1
        if self._num_sharing[lane] == MAX_SHARING:
            self.renew()

    def look_again(self) -> None:
        """Stop passing over the groups that wait for a prefix."""
        self.sharing = {}
        self._num_sharing.clear()
        self.renew()

    def _pass_into(self, passed: dict[SequenceGroup, None], group: SequenceGroup, most: int) -> bool:
        if group in self.left or len(passed) >= most:
            return False
        self._pass(passed, group)
        return True

    def _pass(self, passed: dict[SequenceGroup, None], group: SequenceGroup) -> None:
        passed[group] = None
        if self._upcoming and self._upcoming[-1] is group:
            self._upcoming.pop()

    def renew(self) -> None:
        """Read the next groups again, because the queue has changed."""
        self._upcoming = []

    def ask_again_at(self, now: float) -> float | None:
        """First time at which a group in `left` or `held` may start on this worker."""
        until = [
            group.placement.left_until
            for group in self.left
            if group.placement.left_until is not None and group.placement.left_until >= now
        ]
        until += self.held.values()
        return min(until) if until else None
