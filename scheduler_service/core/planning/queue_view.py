"""The waiting queue as one step of one worker sees it: which groups it looks past, and which of the others is next.

A group is passed over

- while a better worker is there for it (`left`),
- while its adapter has no slot here (`slotless`), or is still to be brought here (`awaiting`),
- while others compute its prefix (`sharing`),
- or while it is a suspect that must wait (`held`).

Later groups may overtake it, within bounds. For an adapter or a prefix no bound is needed: it comes no later for those
that go ahead.
"""

from collections import Counter

from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.placement.balancer import MAX_OVERTAKES
from scheduler_service.core.placement.choice import Placement
from scheduler_service.core.queues.waiting_queue import WaitingQueue

MAX_LEFT = 8  # groups that a step looks past because another worker is to take them
MAX_SLOTLESS = 32  # groups without a slot for their adapter that it looks past as well
MAX_AWAITING = 256  # groups whose adapter is still to be brought that it looks past, which costs little
MAX_SHARING = 256  # groups of one lane that wait for a prefix, which it looks past; the rest of the lane comes later


class QueueView:
    """Made anew for every step. `slotless` may hold swapped groups too."""

    __slots__ = ("_num_sharing", "_upcoming", "_waiting", "_worker", "awaiting", "held", "left", "sharing", "slotless")

    def __init__(self, waiting: WaitingQueue, worker: str) -> None:
        self._waiting = waiting
        self._worker = worker
        self.left: dict[SequenceGroup, Placement] = {}
        self.slotless: dict[SequenceGroup, None] = {}
        self.awaiting: dict[SequenceGroup, None] = {}
        self.sharing: dict[SequenceGroup, None] = {}
        self._num_sharing: Counter[str] = Counter()  # how many of each lane share
        self.held: dict[SequenceGroup, float] = {}  # and until when
        self._upcoming: list[SequenceGroup] = []  # those that are next, as far as they are known, the first one last

    @property
    def next(self) -> SequenceGroup | None:
        """The first group that is not passed over; the queue must not be empty.

        None when those that are left or without a slot have been overtaken often enough.
        """
        if not (self.left or self.slotless or self.awaiting or self.sharing or self.held):
            return self._waiting.head
        if not self._upcoming:
            if self._is_looked_past_enough:
                return None
            passed = {*self.left, *self.slotless, *self.awaiting, *self.sharing, *self.held}
            most = 2 * len(passed) + 1  # each refill asks for twice as many
            full = {lane for lane, number in self._num_sharing.items() if number >= MAX_SHARING}
            groups = self._waiting.upcoming(most, equals=bool(self.left), without=full)
            self._upcoming = [group for group in reversed(groups) if group not in passed]
        return self._upcoming[-1] if self._upcoming else None

    @property
    def is_at_head(self) -> bool:
        """Whether no group is left or without a slot, so that the next group overtakes none."""
        return not self.left and not self.slotless

    @property
    def overtaken(self) -> list[SequenceGroup]:
        """The groups that are overtaken when the next one is admitted."""
        return [*self.left, *self.slotless]

    @property
    def is_slotless_overdue(self) -> bool:
        """Whether a group without a slot has been overtaken as often as it may be."""
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
        """Look past a group that is for another worker."""
        self.left[placement.group] = placement
        self.renew()  # others may go past it than past those without a slot

    def pass_slotless(self, group: SequenceGroup) -> bool:
        """Look past a waiting or swapped group without a slot, if others may overtake it; returns whether they may."""
        return group.placement.num_overtaken < MAX_OVERTAKES and self._pass_into(self.slotless, group, MAX_SLOTLESS)

    def pass_awaiting(self, group: SequenceGroup) -> bool:
        """Look past a group whose adapter is still to be brought here; returns whether that was done."""
        return self._pass_into(self.awaiting, group, MAX_AWAITING)

    def pass_sharing(self, group: SequenceGroup) -> None:
        """Look past a group that waits for a prefix which others compute."""
        self._pass(self.sharing, group)
        lane = self._waiting.lane(group)
        self._num_sharing[lane] += 1
        if self._num_sharing[lane] == MAX_SHARING:
            self.renew()

    def look_again(self) -> None:
        """Ask again for those that waited for a prefix."""
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
        """Ask the queue again for what is next, because it has changed."""
        self._upcoming = []

    def ask_again_at(self, now: float) -> float | None:
        """When the first of those that are left or held may be taken here after all; None without any."""
        until = [
            group.placement.left_until
            for group in self.left
            if group.placement.left_until is not None and group.placement.left_until >= now
        ]
        until += self.held.values()
        return min(until) if until else None
