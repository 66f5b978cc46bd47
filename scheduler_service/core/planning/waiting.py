"""Admits waiting groups to the worker while there is room, and reports the worker's load to the balancer."""

import enum
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from scheduler_service.core.blocks.manager import AllocStatus
from scheduler_service.core.config import PhaseRule
from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.placement.choice import Here, Placement, PlacementReason
from scheduler_service.core.planning.preemption import Preemption
from scheduler_service.core.planning.running import ChunkSizes
from scheduler_service.core.planning.shared_prefixes import SharedPrefixes
from scheduler_service.core.planning.step import SchedulingBudget, Step
from scheduler_service.core.planning.worker_groups import Session


class Verdict(enum.Enum):
    REJECT = enum.auto()
    """The group can never fit the worker, and is ended."""
    TAKE = enum.auto()
    MAKE_ROOM = enum.auto()
    """The group is admitted after running groups were preempted."""
    PASS = enum.auto()
    """The group waits for a prefix or an adapter; the next group is considered."""
    LEAVE = enum.auto()
    """The group waits for another worker."""
    STOP = enum.auto()
    """The group and all groups behind it wait."""


class Decision(NamedTuple):
    verdict: Verdict
    placement: Placement | None = None
    """The balancer's choice; None if it was not asked."""
    victims: SequenceOf[SequenceGroup] = ()

    def placement_of(self, group: SequenceGroup) -> Placement:
        """The balancer's choice, or this worker if the balancer was not asked."""
        if self.placement is not None:
            return self.placement
        return Placement(group, PlacementReason.SUSPECT if group.is_suspect else PlacementReason.ALONE)


class WaitingPlanner:
    """Admits waiting groups to one worker. `admits` is false while the worker is drained."""

    def __init__(
        self, session: Session, chunk_sizes: ChunkSizes, preemption: Preemption, prefixes: SharedPrefixes
    ) -> None:
        self._config = session.config
        self._worker = session.worker
        self._waiting = session.waiting
        self._balancer = session.balancer
        self._member = session.member
        self._blocks = session.blocks
        self._groups = session.groups
        self._adapters = session.adapters
        self._in_flight = session.in_flight
        self._chunk_sizes = chunk_sizes
        self._preemption = preemption
        self._prefixes = prefixes
        self._has_reported = False  # whether this call of `schedule` has reported the load
        self.admits = True

    # ---- room on this worker

    def room_for(self, group: SequenceGroup) -> int | None:
        """Tokens of a waiting group that are cached or being computed here; None if the next step has no room."""
        groups = self._groups
        if not self.admits or groups.swapped or groups.suspect is not None:
            return None
        if group.num_seqs > self._config.max_num_seqs - self._member.num_seqs or not self._adapters.has_slot(group):
            return None
        if group.largest_image > self._config.max_image_tokens:
            return None
        if self._blocks.can_allocate(group, leave_watermark=bool(groups.running)) is not AllocStatus.OK:
            return None
        return self._blocks.cache.num_shared_tokens(group.live[0])

    def status(self, group: SequenceGroup, budget: SchedulingBudget) -> AllocStatus:
        """Whether a waiting group fits the worker and the rest of a step's budget."""
        if self._never_fits(group):
            return AllocStatus.NEVER  # checked first: no group is preempted for such a group
        if not budget.num_tokens or group.num_seqs > budget.num_seqs:
            return AllocStatus.LATER
        if group.adapter_id and not self._adapters.has_slot(group):
            return AllocStatus.LATER
        if self._config.is_encoder and len(group.prompt_token_ids) > budget.num_tokens:
            return AllocStatus.LATER  # an encoder model computes a prompt in one step
        if not self._has_encoder_tokens(group, budget):
            return AllocStatus.LATER
        return self._blocks.can_allocate(group, leave_watermark=bool(self._groups.running))

    def _never_fits(self, group: SequenceGroup) -> bool:
        return (
            group.num_seqs > self._config.max_num_seqs
            or group.num_encoder_tokens > self._config.max_num_encoder_tokens
            or group.largest_image > self._config.max_image_tokens
            or self._blocks.never_fits(group)
        )

    def _has_encoder_tokens(self, group: SequenceGroup, budget: SchedulingBudget) -> bool:
        """Whether the budget has the group's encoder tokens, or the encoder's input is cached."""
        return group.num_encoder_tokens <= budget.num_encoder_tokens or self._blocks.cache.has_encoded(group)

    def is_time(self, now: float) -> bool:
        """Whether the oldest waiting group has waited long enough for further prompts to join its step."""
        if not self._waiting or not self._groups.running:
            return True
        return now - self._waiting.earliest_arrival >= self._config.delay_factor * self._in_flight.prompt_seconds

    def breaks_plan(self, now: float) -> bool:
        """Whether the next waiting group ends the steady plan."""
        if not (self._waiting and self.admits and self._groups.running):
            return False
        if self._config.phase_rule is PhaseRule.SEPARATE and self.is_time(now):
            return True
        return self.could_make_room(self._waiting.head)

    def could_make_room(self, group: SequenceGroup) -> bool:
        """Whether a waiting group outranks any running group. At least one group must run."""
        return self._waiting.outranks(group, self._waiting.victim(self._groups.running))

    # ---- admission

    def schedule_sharing(self, step: Step) -> bool:
        """Admit groups whose missing prefix this step now computes. Returns whether any group waited."""
        if not step.queue.sharing:
            return False
        step.queue.look_again()
        step.release()
        self.schedule(step)
        return True

    def schedule(self, step: Step, suspect: SequenceGroup | None = None) -> None:
        """Admit waiting groups one after another, or only the `suspect` whose turn it is. Before swapped groups, only
        groups that outrank the next one are admitted; ageing bounds their number."""
        if step.num_preempted:
            return
        self._has_reported = False
        most: int | None = None if suspect is None else 1
        while self.admits and self._waiting and step.budget.num_bytes > 0 and len(step.chunks) != most:
            if (group := step.queue.next) is None:
                return
            decision = self._decide(group, step, is_turn=suspect is not None)
            match decision.verdict:
                case Verdict.REJECT:
                    self._ignore(group, step)
                case Verdict.TAKE:
                    self._admit(decision.placement_of(group), step)
                case Verdict.MAKE_ROOM:
                    self._preemption.preempt(decision.victims, step)
                    # Preempted groups are not admitted again at once.
                    most = len(step.chunks) + 1
                    self._admit(decision.placement_of(group), step)
                case Verdict.PASS:
                    pass
                case Verdict.LEAVE:
                    placement = decision.placement_of(group)
                    self.leave(placement, step)
                    if placement.reason in (PlacementReason.LOAD, PlacementReason.ROOM):
                        return  # this worker has too much work for later groups, too
                case Verdict.STOP:
                    return

    def _decide(self, group: SequenceGroup, step: Step, *, is_turn: bool) -> Decision:
        """The decision about the next waiting group. `is_turn`: the step is planned for this suspect alone."""
        if not is_turn and (group.is_suspect or self._yields_to_swapped(group, step)):
            return Decision(Verdict.STOP)
        # A group that waits for a prefix was checked when the wait began.
        if self._worker not in group.placement.prefix_waits and self._never_fits(group):
            return Decision(Verdict.REJECT)
        if not is_turn:
            if not self._prefixes.may_look(step):
                return Decision(Verdict.STOP)
            if self._prefixes.awaits(group, step):
                step.queue.pass_sharing(group)
                step.reserve(group.num_seqs)
                return Decision(Verdict.PASS)
        has_choice = not is_turn and self._balancer.has_others(self._member)
        match self.status(group, step.budget):
            case AllocStatus.NEVER:  # an earlier session had more room
                return Decision(Verdict.REJECT)
            case AllocStatus.LATER:
                return self._decide_without_room(group, step, is_turn=is_turn, has_choice=has_choice)
            case AllocStatus.OK if not has_choice:
                return Decision(Verdict.TAKE)
            case AllocStatus.OK:
                if not self._has_reported:
                    self.report(step)
                    self._has_reported = True
                placement = self.here_or_elsewhere(group, step)
                return Decision(Verdict.TAKE if placement.to is None else Verdict.LEAVE, placement)

    def _decide_without_room(self, group: SequenceGroup, step: Step, *, is_turn: bool, has_choice: bool) -> Decision:
        """Preempt other groups, leave the group to another worker, pass over it, or stop."""
        if step.queue.is_at_head and self._may_preempt_for(group, step):
            if has_choice and (elsewhere := self.elsewhere(group, step)) is not None:
                return Decision(Verdict.LEAVE, elsewhere)
            if (victims := self._preemption.victims(group, step)) is not None:
                return Decision(Verdict.MAKE_ROOM, victims=victims)
        if not is_turn and self.pass_over(group, step):
            return Decision(Verdict.PASS)
        return Decision(Verdict.STOP)

    def _ignore(self, group: SequenceGroup, step: Step) -> None:
        self._groups.ignore(group)
        step.ignored.append(group)
        step.queue.renew()

    def _yields_to_swapped(self, group: SequenceGroup, step: Step) -> bool:
        swapped = next((swapped for swapped in self._groups.swapped if swapped not in step.queue.slotless), None)
        return swapped is not None and not self._waiting.outranks(group, swapped)

    def _may_preempt_for(self, group: SequenceGroup, step: Step) -> bool:
        """Groups of an encoder model are never preempted, because they end after one step."""
        if self._config.is_encoder or not self._adapters.holds(group.adapter_id) or not self.could_make_room(group):
            return False
        return self._has_encoder_tokens(group, step.budget)

    # ---- choices between workers

    def here_or_elsewhere(self, group: SequenceGroup, step: Step) -> Placement:
        """The balancer's choice for a group that this worker has room for."""
        placement = self._choose(group, Here.HAS_ROOM, step)
        assert placement is not None
        return placement

    def elsewhere(self, group: SequenceGroup, step: Step) -> Placement | None:
        """Another worker for a group that has no room here; None if there is none."""
        return None if self._balancer.is_overdue(group, step.now) else self._choose(group, Here.IS_FULL, step)

    def _choose(self, group: SequenceGroup, here: Here, step: Step) -> Placement | None:
        offers = self._balancer.offers(member=self._member, group=group, here=here, now=step.now)
        return self._balancer.choose(
            member=self._member, group=group, offers=offers, now=step.now, num_waiting=len(self._waiting)
        )

    def pass_over(self, group: SequenceGroup, step: Step) -> bool:
        """Pass over a group whose adapter has no slot here, unless no later group could start. Returns whether the
        group was passed over."""
        if self._adapters.has_slot(group) or not (step.budget.num_seqs and step.budget.num_tokens):
            return False
        return self.await_adapter(group, step) or step.queue.pass_slotless(group)

    def await_adapter(self, group: SequenceGroup, step: Step) -> bool:
        """Pass over a group whose adapter this worker does not hold, and leave it to a better worker or ask for a fetch
        in `step.lacking_adapters`. Returns whether the group was passed over."""
        if self._adapters.holds(group.adapter_id):
            return False
        # The balancer's choice is the same for all groups with this adapter.
        if group.adapter_id not in step.lacking_adapters:
            if not self._balancer.is_overdue(group, step.now):
                placement = self._choose(group, Here.LACKS_ADAPTER, step)
                if placement is not None and self.leave(placement, step):
                    return True
            step.lacking_adapters[group.adapter_id] = None
        return self._adapters.can_come(group.adapter_id) and step.queue.pass_awaiting(group)

    def leave(self, placement: Placement, step: Step) -> bool:
        """Leave a group in the queue if the placement names another worker. Returns whether it was left."""
        if placement.to is None:
            return False
        step.queue.leave(placement)
        self._balancer.left(placement, step.now)
        return True

    def _admit(self, placement: Placement, step: Step) -> None:
        group = placement.group
        self._groups.admit(group)
        group.placement.prefix_waits.clear()
        group.placement.reason = placement.reason.name
        group.history.num_worker_changes += group.history.worker not in (None, self._worker)
        group.history.worker = self._worker
        leader = group.live[0]
        num_cached = leader.num_computed_tokens + (group.encoder.num_computed_tokens if group.encoder else 0)
        if group.history.num_cached_tokens is None:
            group.history.num_cached_tokens = num_cached
            self._waiting.charge(group, group.num_prompt_tokens, 0)
        placement = placement._replace(cached_tokens=num_cached, num_overtaken=group.placement.num_overtaken)
        self._balancer.took(self._member, placement)
        self._balancer.overtook(step.queue.overtaken)
        step.queue.renew()
        step.placements.append(placement)
        step.prompts.append(group)
        step.budget.take(num_seqs=group.num_seqs)
        chunks = self._chunk_sizes.of(group, step)
        if self._blocks.states:
            for chunk in chunks:
                chunk.copies = self._blocks.append_slots(chunk.sequence, chunk.num_tokens)
        step.take(group, chunks)
        for chunk in chunks:
            self._chunk_sizes.planned(chunk)
            self._prefixes.planned(chunk, step)

    # ---- reports to the balancer

    def set_admission(self, admits: bool) -> None:
        self.admits = admits
        self._report(self._member.backlog, self._member.num_seqs)

    def report(self, step: Step) -> None:
        backlog = 0
        for group in step.prompts:
            if group in self._groups.running:
                for sequence in group.with_tables:
                    if sequence.id in self._blocks.tables:
                        backlog += max(0, sequence.num_tokens - sequence.num_computed_tokens)
        self._report(backlog, self._config.max_num_seqs - step.budget.num_seqs - step.num_reserved)

    def _report(self, backlog: int, num_seqs: int) -> None:
        self._balancer.report(self._member, backlog, num_seqs, is_open=self.admits and not self._groups.swapped)
