"""Decides which worker takes a waiting group, among the workers that share a queue.

A scheduler with room for a group asks the balancer whether to take the group or leave it to a better worker. A worker
is better if it would finish the group's tokens sooner, by its work, its speed and its cached tokens. Only a worker that
has room now can be better, so one of the workers that ask always takes the group.

A group is left at most for the time that the better worker would have saved: at most twice the necessary wait. After
MAX_OVERTAKES overtakes by later groups, the first worker that asks takes the group.

A worker passes over a group whose adapter has no free slot or is not held. The worker fetches the adapter only if it
would still finish the group sooner than the adapter's holders. A suspect waits without a time limit for a worker that
was not lost with the suspect in flight.

If nothing is cached and many groups wait, a worker takes its share of the groups at once. With its share, a worker has
as much work as each worker will have when all waiting groups are placed.

Every operation takes O(log workers), except that all workers are examined for a suspect.
"""

import heapq
import itertools
from collections.abc import Collection

from scheduler_service.core.blocks.allocator import PrefixDirectory
from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.placement.background import Background
from scheduler_service.core.placement.choice import LAST, Here, Offer, Placement, PlacementReason
from scheduler_service.core.placement.step_times import StepTimes
from scheduler_service.core.placement.worker import SEQUENCE_TOKENS, Member, WorkerScheduler

MAX_OVERTAKES = 16
MAX_CANDIDATES = 4  # workers with the prefix, with the adapter and without a slot that are examined


class Balancer:
    def __init__(self) -> None:
        self.times = StepTimes()
        self.directory = PrefixDirectory()
        self.adapter_directory = PrefixDirectory()
        self.num_placed = dict.fromkeys(PlacementReason, 0)
        """Groups that were taken, by reason."""
        self.num_left = dict.fromkeys(PlacementReason, 0)
        """Times that a worker left a group to another worker, by reason."""
        self.num_overtakes = 0
        """Times that a group was taken before an earlier group that was left or had no adapter slot."""
        self.num_moved = 0
        """Swapped groups that moved to another worker."""
        self.background = Background()
        self._members: dict[int, Member] = {}
        self._is_open = 0  # the workers that admit groups, one bit each
        self._num_open = 0
        self._work = 0  # total work of the workers that admit groups
        self._speed = 0
        self._lightest: list[tuple[float, int, int]] = []  # (work, entry, slot)
        self._entries = itertools.count()

    def __len__(self) -> int:
        return len(self._members)

    # ---- membership

    def join(self, scheduler: WorkerScheduler) -> Member:
        slot = next(slot for slot in itertools.count() if slot not in self._members)
        member = self._members[slot] = Member(scheduler, slot)
        self.times.expect(scheduler.config.prefill_tokens_per_second)
        self.report(member, 0, 0, is_open=True)
        return member

    def leave(self, member: Member) -> None:
        if self._members.get(member.slot) is member:
            self.report(member, 0, 0, is_open=False)
            del self._members[member.slot]
            # The two refer to each other, and would stay in memory until the garbage collector runs.
            del member.scheduler

    def report(self, member: Member, backlog: int, num_seqs: int, *, is_open: bool) -> None:
        speed = member.slowness.speed
        before = member.backlog, member.num_seqs, member.speed, member.is_open
        if before == (backlog, num_seqs, speed, is_open):
            return
        self._count(member, -1)
        member.backlog, member.num_seqs, member.is_open, member.speed = backlog, num_seqs, is_open, speed
        self._count(member, 1)
        member.entry = -1
        if is_open:
            self._push(member)

    def _count(self, member: Member, sign: int) -> None:
        if member.is_open:
            self._is_open ^= member.bit
            self._num_open += sign
            self._work += sign * member.work
            self._speed += sign * member.speed

    def _push(self, member: Member) -> None:
        member.entry = next(self._entries)
        heapq.heappush(self._lightest, (member.work / member.speed, member.entry, member.slot))
        if len(self._lightest) > 4 * len(self._members) + 64:  # most entries are stale
            self._lightest = [entry for entry in self._lightest if self._member_of(entry) is not None]
            heapq.heapify(self._lightest)

    def _member_of(self, entry: tuple[float, int, int]) -> Member | None:
        """The worker of a heap entry; None for a stale entry."""
        member = self._members.get(entry[2])
        return member if member is not None and member.entry == entry[1] else None

    # ---- choice of a worker

    def has_others(self, member: Member) -> bool:
        """Whether any other worker admits groups now."""
        return self._num_open > member.is_open

    def other_workers(self, member: Member) -> list[WorkerScheduler]:
        """Other workers that admit groups, including workers that are full of swapped groups. O(workers)."""
        return [other.scheduler for other in self._members.values() if other is not member and other.scheduler.admits]

    def is_overdue(self, group: SequenceGroup, now: float) -> bool:
        """Whether a group waited for its maximum time, or was overtaken MAX_OVERTAKES times."""
        placement = group.placement
        return placement.num_overtaken >= MAX_OVERTAKES or (
            placement.left_until is not None and now > placement.left_until
        )

    def offers(self, *, member: Member, group: SequenceGroup, here: Here, now: float) -> list[Offer]:
        """The offers of `member`, which asks, and of a few other workers with room: those with the least work, the
        longest prefix or the adapter. If `member` lacks the adapter, only its holders are asked."""
        match here:
            case Here.HAS_ROOM:
                own = self._offer(member, group, member.scheduler.blocks.cache.num_shared_tokens(group.live[0]), now)
                if self.is_overdue(group, now):
                    return [own]
                return [own, *self._others(member, group, now, self._next_lightest(member, group))]
            case Here.IS_FULL:
                # While many groups wait, usually no other worker has room.
                lightest = self._next_lightest(member, group) if self.has_others(member) else []
                return self._others(member, group, now, lightest) if lightest else []
            case Here.LACKS_ADAPTER:
                others = self._with_room(member, group, now, self._adapter_holders(member, group))
                if not others:
                    return []
                own = self._offer(member, group, member.scheduler.blocks.cache.num_shared_tokens(group.live[0]), now)
                own = own._replace(seconds=own.seconds + member.adapter_seconds, order=LAST, lacks_adapter=True)
                return [own, *others]

    def choose(
        self, *, member: Member, group: SequenceGroup, offers: list[Offer], now: float, num_waiting: int = 1
    ) -> Placement | None:
        """Whether `member` takes a group, or to which worker it leaves the group. `num_waiting` includes this group."""
        own = next((offer for offer in offers if offer.member is member), None)
        best = min((offer for offer in offers if offer is not own), key=lambda offer: offer[:2], default=None)
        placement = Placement(group, PlacementReason.ALONE, num_overtaken=group.placement.num_overtaken)
        if own is not None:
            placement = placement._replace(seconds=own.seconds, cached_tokens=own.cached_tokens)
        if best is None:
            if own is None:
                return None
            return placement._replace(reason=PlacementReason.OVERDUE) if self.is_overdue(group, now) else placement
        placement = placement._replace(seconds_there=best.seconds, cached_tokens_there=best.cached_tokens)
        to = best.member.scheduler
        if own is None:
            return placement._replace(reason=PlacementReason.ROOM, to=to)
        if own[:2] < best[:2]:
            has_more = own.cached_tokens > best.cached_tokens
            return placement._replace(reason=PlacementReason.AFFINITY if has_more else PlacementReason.LOAD)
        if own.lacks_adapter:
            return placement._replace(reason=PlacementReason.AFFINITY, to=to)
        if group.is_suspect:
            return placement._replace(reason=PlacementReason.SUSPECT, to=to)
        if best.cached_tokens > own.cached_tokens:
            return placement._replace(reason=PlacementReason.AFFINITY, to=to)
        if num_waiting > 1 and self._is_share(member, group, own.cached_tokens, num_waiting):
            return placement._replace(reason=PlacementReason.SHARE)
        return placement._replace(reason=PlacementReason.LOAD, to=to)

    def _first_members(self, bits: int) -> list[Member]:
        members: list[Member] = []
        while bits and len(members) < MAX_CANDIDATES:
            slot = bits.bit_length() - 1
            bits ^= 1 << slot
            members.append(self._members[slot])
        return members

    def _others(self, member: Member, group: SequenceGroup, now: float, lightest: list[Member]) -> list[Offer]:
        holders = self._holders(member, group)
        if group.adapter_id:
            holders += self._adapter_holders(member, group)
        return self._with_room(member, group, now, [*holders, *lightest])

    def _adapter_holders(self, member: Member, group: SequenceGroup) -> list[Member]:
        bits = self.adapter_directory.holders([group.adapter_id.encode()], 0, self._is_open & ~member.bit)
        return self._first_members(bits)

    def _with_room(self, member: Member, group: SequenceGroup, now: float, others: list[Member]) -> list[Offer]:
        """The offers of workers with room. For a suspect, workers where a loss would prove less than on `member` make
        no offer."""
        suspicion = group.suspicion if group.is_suspect else None
        most = suspicion.reluctance(member.scheduler.worker) if suspicion is not None else 0
        found: list[Offer] = []
        for other in others:
            if suspicion is not None and suspicion.reluctance(other.scheduler.worker) > most:
                continue
            cached = other.scheduler.room_for(group)
            if cached is not None:
                found.append(self._offer(other, group, cached, now))
        return found

    def _offer(self, member: Member, group: SequenceGroup, cached: int, now: float) -> Offer:
        return Offer(self._seconds(member, group, cached, now), member.entry, member, cached)

    def _next_lightest(self, member: Member, group: SequenceGroup) -> list[Member]:
        """A list with the other worker that has room and the least work, if any.

        A worker without room leaves the heap until its work changes. A worker that only lacks an adapter slot stays.
        """
        aside: list[tuple[float, int, int]] = []
        found: list[Member] = []
        num_slotless = 0
        while self._lightest and not found and num_slotless < MAX_CANDIDATES:
            entry = heapq.heappop(self._lightest)
            other = self._member_of(entry)
            if other is None:
                continue
            if other is member:
                aside.append(entry)
            elif not other.scheduler.has_adapter_slot(group):
                aside.append(entry)
                num_slotless += 1
            elif other.scheduler.room_for(group) is None:
                other.entry = -1
            else:
                aside.append(entry)
                found.append(other)
        for entry in aside:
            heapq.heappush(self._lightest, entry)
        return found

    def _holders(self, member: Member, group: SequenceGroup) -> list[Member]:
        """Up to MAX_CANDIDATES other workers that hold at least as long a prefix as `member`."""
        leader = group.live[0]
        keys = member.scheduler.blocks.cache.keys.findable(leader)
        first = max(0, len(member.scheduler.blocks.device.find_run(keys)) - 1)
        bits = self.directory.holders(keys, first, self._is_open & ~member.bit)
        return self._first_members(bits)

    def _is_share(self, member: Member, group: SequenceGroup, cached: int, num_waiting: int) -> bool:
        """Whether `member` with the group has at most its share of the fleet's work, if all waiting groups are as
        large. Half of the group's tokens may exceed the share."""
        tokens = _num_tokens(group) - cached + SEQUENCE_TOKENS * group.num_seqs
        return (2 * member.work + tokens) * self._speed <= 2 * (self._work + num_waiting * tokens) * member.speed

    def _seconds(self, member: Member, group: SequenceGroup, cached: int, now: float) -> float:
        """Seconds until the worker would have computed its present work and this group's tokens."""
        tokens = _num_tokens(group) - cached + SEQUENCE_TOKENS * group.num_seqs
        factor = 1000 / member.speed
        seconds = factor * self.times.seconds(member.work + tokens) + self._seconds_in_flight(member, factor, now)
        return seconds + member.scheduler.seconds_to_copy(group) if group.adapter_id else seconds

    def _seconds_in_flight(self, member: Member, factor: float, now: float) -> float:
        """Seconds that the steps in flight still take; overdue steps are expected to take as long again."""
        steps = member.scheduler.steps_in_flight
        if not steps:
            return 0.0
        expected = factor * sum(self.times.seconds(step.num_tokens) for step in steps)
        began = max(steps[0].planned_at, member.scheduler.answered_at)
        return abs(began + expected - now)

    # ---- records of choices

    def took(self, member: Member, placement: Placement) -> None:
        group = placement.group
        self.num_placed[placement.reason] += 1
        group.placement.left_until = None
        if not self.has_others(member):
            return
        backlog = member.backlog + _num_tokens(group) - placement.cached_tokens
        self.report(member, backlog, member.num_seqs + group.num_seqs, is_open=member.is_open)

    def left(self, placement: Placement, now: float) -> None:
        group = placement.group
        self.num_left[placement.reason] += 1
        if group.placement.left_until is None:
            group.placement.left_until = now + abs(placement.seconds - placement.seconds_there)

    def overtook(self, groups: Collection[SequenceGroup]) -> None:
        self.num_overtakes += len(groups)
        for group in groups:
            group.placement.num_overtaken += 1

    def stepped(self, member: Member, num_tokens: int, seconds: float) -> None:
        """Record the duration of a worker's step. A single worker's steps are not recorded."""
        if len(self._members) > 1 and seconds > 0 and num_tokens:
            member.slowness.observe(self.times.observe(num_tokens, seconds))


def _num_tokens(group: SequenceGroup) -> int:
    """Tokens that a worker computes if nothing is cached."""
    return group.live[0].num_tokens + group.num_encoder_tokens
