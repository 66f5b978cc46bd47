"""The waiting queue in one step of one worker: which groups are passed over, and which group is next.

A step passes over groups of five kinds. `left`: a better worker is available for the group. `slotless`: the worker has
no free slot for the group's adapter. `awaiting`: the group's adapter must be fetched first. `sharing`: other groups
compute the group's prefix. `held`: the group is a suspect that must wait.

Later groups may overtake a group that is passed over. Groups in `left` and `slotless` are overtaken at most
MAX_OVERTAKES times. Groups in `awaiting` or `sharing` are overtaken without a limit, because later groups delay neither
the adapter nor the prefix.
"""

from collections import Counter

from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.placement.balancer import MAX_OVERTAKES
from scheduler_service.core.placement.choice import Placement
from scheduler_service.core.queues.waiting_queue import WaitingQueue

MAX_LEFT = 8  # Maximum number of groups that a step passes over because they are left to other workers.
MAX_SLOTLESS = 32  # Maximum number of groups that a step passes over because their adapters have no slot.
MAX_AWAITING = 256  # Limit of groups that a step passes over because they wait for an adapter; each group costs little.
MAX_SHARING = 256  # Maximum number of groups of one lane that a step passes over because they wait for a prefix.


class QueueView:
    """One step's view of the waiting queue; every step creates a new view. `slotless` can contain swapped groups
    too."""

    __slots__ = ("_num_sharing", "_upcoming", "_waiting", "_worker", "awaiting", "held", "left", "sharing", "slotless")

    def __init__(self, waiting: WaitingQueue, worker: str) -> None:
        self._waiting = waiting
        self._worker = worker
        self.left: dict[SequenceGroup, Placement] = {}
        self.slotless: dict[SequenceGroup, None] = {}
        self.awaiting: dict[SequenceGroup, None] = {}
        self.sharing: dict[SequenceGroup, None] = {}
        self._num_sharing: Counter[str] = Counter()  # Number of groups in `sharing`, by lane of the queue.
        self.held: dict[SequenceGroup, float] = {}  # Suspects that must wait, and the time at which each wait ends.
        self._upcoming: list[SequenceGroup] = []  # The groups that were read from the queue, in reverse order.

    @property
    def next(self) -> SequenceGroup | None:
        """The first group that is not passed over; None if there is none. The queue must not be empty.

        The result is also None if `left` is full, or if a group in `left` or `slotless` was overtaken MAX_OVERTAKES
        times.
        """
        if not (self.left or self.slotless or self.awaiting or self.sharing or self.held):
            return self._waiting.head
        if not self._upcoming:
            if self._is_looked_past_enough:
                return None
            passed = {*self.left, *self.slotless, *self.awaiting, *self.sharing, *self.held}
            most = 2 * len(passed) + 1  # each further query of the queue requests about twice as many groups
            full = {lane for lane, number in self._num_sharing.items() if number >= MAX_SHARING}
            groups = self._waiting.upcoming(most, equals=bool(self.left), without=full)
            self._upcoming = [group for group in reversed(groups) if group not in passed]
        return self._upcoming[-1] if self._upcoming else None

    @property
    def is_at_head(self) -> bool:
        """Whether `left` and `slotless` are empty, so that the next group overtakes no group."""
        return not self.left and not self.slotless

    @property
    def overtaken(self) -> list[SequenceGroup]:
        """The groups that are overtaken if the next group is admitted."""
        return [*self.left, *self.slotless]

    @property
    def is_slotless_overdue(self) -> bool:
        """Whether a group without an adapter slot was overtaken MAX_OVERTAKES times."""
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
        """Pass over a group that is left to another worker."""
        self.left[placement.group] = placement
        self.renew()  # if `left` is not empty, only groups of equal priority may overtake

    def pass_slotless(self, group: SequenceGroup) -> bool:
        """Pass over a waiting or swapped group without an adapter slot. Returns whether the group was passed over."""
        return group.placement.num_overtaken < MAX_OVERTAKES and self._pass_into(self.slotless, group, MAX_SLOTLESS)

    def pass_awaiting(self, group: SequenceGroup) -> bool:
        """Pass over a group whose adapter must be fetched first. Returns whether the group was passed over."""
        return self._pass_into(self.awaiting, group, MAX_AWAITING)

    def pass_sharing(self, group: SequenceGroup) -> None:
        """Pass over a group that waits for a prefix which other groups compute."""
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
        """Read the next groups from the queue again, because the queue has changed."""
        self._upcoming = []

    def ask_again_at(self, now: float) -> float | None:
        """The first time at which a group in `left` or `held` may start on this worker; None if no group has such a
        time."""
        until = [
            group.placement.left_until
            for group in self.left
            if group.placement.left_until is not None and group.placement.left_until >= now
        ]
        until += self.held.values()
        return min(until) if until else None
