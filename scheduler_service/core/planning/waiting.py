"""Admits waiting groups to the worker while it has room for them, and tells the balancer what there is to do here."""

from scheduler_service.core.blocks.manager import AllocStatus
from scheduler_service.core.config import PhaseRule
from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.placement.choice import Placement, PlacementReason
from scheduler_service.core.planning.preemption import Preemption
from scheduler_service.core.planning.running import ChunkSizes
from scheduler_service.core.planning.shared_prefixes import SharedPrefixes
from scheduler_service.core.planning.step import SchedulingBudget, Step
from scheduler_service.core.planning.worker_groups import Session


class WaitingPlanner:
    """`admits` says whether waiting groups may be given to the worker at all."""

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
        self._loras = session.loras
        self._in_flight = session.in_flight
        self._chunk_sizes = chunk_sizes
        self._preemption = preemption
        self._prefixes = prefixes
        self.admits = True

    # ---- whether there is room

    def room_for(self, group: SequenceGroup) -> int | None:
        """Tokens that a waiting group would find, cached or being computed; None if the next step could not take it."""
        groups = self._groups
        if not self.admits or groups.swapped or groups.suspect is not None:
            return None
        if group.num_seqs > self._config.max_num_seqs - self._member.num_seqs or not self._loras.has_slot(group):
            return None
        if self._blocks.can_allocate(group, leave_watermark=bool(groups.running)) is not AllocStatus.OK:
            return None
        return self._blocks.num_shared_tokens(group.live[0])

    def status(self, group: SequenceGroup, budget: SchedulingBudget) -> AllocStatus:
        """Whether a waiting group fits the worker and what is left of a step."""
        if self._never_fits(group):
            return AllocStatus.NEVER  # before any group is preempted for it
        if not budget.num_tokens or group.num_seqs > budget.num_seqs or not self._loras.has_slot(group):
            return AllocStatus.LATER
        if self._config.is_encoder and len(group.prompt_token_ids) > budget.num_tokens:
            return AllocStatus.LATER  # it is computed whole
        if not self._has_encoder_tokens(group, budget):
            return AllocStatus.LATER
        return self._blocks.can_allocate(group, leave_watermark=bool(self._groups.running))

    def _never_fits(self, group: SequenceGroup) -> bool:
        return (
            group.num_seqs > self._config.max_num_seqs
            or group.num_encoder_tokens > self._config.max_num_encoder_tokens
            or self._blocks.sizes.never_fits(group)
        )

    def _has_encoder_tokens(self, group: SequenceGroup, budget: SchedulingBudget) -> bool:
        """Whether a step has tokens left for what the group's encoder reads, if that is not cached."""
        return group.num_encoder_tokens <= budget.num_encoder_tokens or self._blocks.has_encoded(group)

    def is_time(self, now: float) -> bool:
        """Whether the earliest arrival has waited for long enough that prompts could batch up."""
        if not self._waiting or not self._groups.running:
            return True
        return now - self._waiting.earliest_arrival >= self._config.delay_factor * self._in_flight.prompt_seconds

    def breaks_plan(self, now: float) -> bool:
        """Whether the next waiting group wants another step than one in which all that runs computes one token."""
        if not (self._waiting and self.admits):
            return False
        if self._config.phase_rule is PhaseRule.SEPARATE and self.is_time(now):
            return True
        return self.could_make_room(self._waiting.head)

    def could_make_room(self, group: SequenceGroup) -> bool:
        """Whether a waiting group outranks any running one; at least one must run."""
        return self._waiting.outranks(group, self._waiting.victim(self._groups.running))

    # ---- admission

    def schedule_sharing(self, step: Step) -> bool:
        """Admit those that waited for a prefix which the step computes by now; returns whether there may be any."""
        if not step.queue.sharing:
            return False
        step.queue.look_again()
        step.release()
        self.schedule(step)
        return True

    def schedule(self, step: Step, suspect: SequenceGroup | None = None) -> None:
        """Admit groups in turn, or only the `suspect` that is next; before a swapped one only those that outrank it.

        Age bounds how many outrank it, and with that how often it is overtaken.
        """
        has_choice = suspect is None and self._balancer.has_others(self._member)
        has_reported = False
        most: int | None = None if suspect is None else 1
        if step.num_preempted:
            return
        while self.admits and self._waiting and step.budget.num_bytes > 0 and len(step.chunks) != most:
            group = step.queue.next
            if group is None or (suspect is None and (group.is_suspect or self._yields_to_swapped(group, step))):
                return  # a suspect is admitted in a step of its own
            if self._worker not in group.placement.prefix_waits and self._never_fits(
                group
            ):  # a look at one that waits is short
                self._ignore(group, step)
                continue
            if suspect is None:
                if not self._prefixes.may_look(step):
                    return
                if self._prefixes.awaits(group, step):
                    step.queue.pass_sharing(group)
                    step.reserve(group.num_seqs)
                    continue
            status = self.status(group, step.budget)
            if status is AllocStatus.NEVER:  # it waited in the worker's last session, which had more room
                self._ignore(group, step)
                continue
            placement = Placement(group, PlacementReason.ALONE if suspect is None else PlacementReason.SUSPECT)
            if status is AllocStatus.LATER:
                if step.queue.is_at_head and self._make_room(group, step, has_choice=has_choice):
                    most = len(step.chunks) + 1  # groups that made room for this one do not come back at once
                elif suspect is None and self.pass_over(group, step):
                    continue
                else:
                    return
            elif has_choice:
                if not has_reported:
                    self.report(step)
                    has_reported = True
                placement = self._balancer.place(self._member, group, len(self._waiting), step.now)
                if self.leave(placement, step):
                    if placement.reason is PlacementReason.LOAD:
                        return  # there is too much to do here for those after it as well
                    continue
            self._admit(group, placement, step)

    def _ignore(self, group: SequenceGroup, step: Step) -> None:
        self._groups.ignore(group)
        step.ignored.append(group)
        step.queue.renew()

    def _yields_to_swapped(self, group: SequenceGroup, step: Step) -> bool:
        swapped = next((swapped for swapped in self._groups.swapped if swapped not in step.queue.slotless), None)
        return swapped is not None and not self._waiting.outranks(group, swapped)

    def _make_room(self, group: SequenceGroup, step: Step, *, has_choice: bool) -> bool:
        """Preempt running groups for a waiting one, unless it is left to another worker that has room for it.

        Those of an encoder run for one step, and then they have ended.
        """
        if self._config.is_encoder or not self._loras.holds(group.lora_name) or not self.could_make_room(group):
            return False
        if not self._has_encoder_tokens(group, step.budget):
            return False
        elsewhere = self._balancer.place_elsewhere(self._member, group, step.now) if has_choice else None
        if elsewhere is not None:
            self.leave(elsewhere, step)
            return False
        return self._preemption.make_room(group, step)

    def pass_over(self, group: SequenceGroup, step: Step) -> bool:
        """Look past a group whose adapter has no slot here, if others may overtake it; returns whether that was done.

        With no sequence or no token left in the budget there are no others to look for.
        """
        if self._loras.has_slot(group) or not (step.budget.num_seqs and step.budget.num_tokens):
            return False
        return self.await_lora(group, step) or step.queue.pass_slotless(group)

    def await_lora(self, group: SequenceGroup, step: Step) -> bool:
        """Look past a group whose adapter can be brought here, and say which that is, or leave it to a worker that has
        the adapter; returns whether that was done."""
        if self._loras.holds(group.lora_name):
            return False
        if group.lora_name not in step.lacking_loras:  # what goes for one goes for the others
            placement = self._balancer.place_at_holder(self._member, group, step.now)
            if placement is not None:
                return self.leave(placement, step)
            step.lacking_loras[group.lora_name] = None
        return self._loras.can_come(group.lora_name) and step.queue.pass_awaiting(group)

    def leave(self, placement: Placement, step: Step) -> bool:
        """Leave a group in the queue, if it is for another worker."""
        if placement.to is None:
            return False
        step.queue.leave(placement)
        self._balancer.left(placement, step.now)
        return True

    def _admit(self, group: SequenceGroup, placement: Placement, step: Step) -> None:
        self._groups.admit(group)
        group.placement.prefix_waits.clear()
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
        step.take(group, chunks)
        for chunk in chunks:
            self._prefixes.planned(chunk, step)

    # ---- what the balancer is told

    def set_admission(self, admits: bool) -> None:
        """Admit waiting groups from now on, or none while the worker is drained."""
        self.admits = admits
        self._report(self._member.backlog, self._member.num_seqs)

    def report(self, step: Step) -> None:
        """Tell the balancer what there is to do here, as of this step."""
        backlog = 0
        for group in step.prompts:
            if group in self._groups.running:
                for sequence in group.with_tables:
                    if sequence.id in self._blocks.tables:
                        backlog += max(0, sequence.num_tokens - sequence.num_computed_tokens)
        self._report(backlog, self._config.max_num_seqs - step.budget.num_seqs - step.num_reserved)

    def _report(self, backlog: int, num_seqs: int) -> None:
        self._balancer.report(self._member, backlog, num_seqs, is_open=self.admits and not self._groups.swapped)
