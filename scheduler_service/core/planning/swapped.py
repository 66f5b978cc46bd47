"""Resumes swapped groups, one after another, while there is room, or returns them to the queue for another worker."""

from scheduler_service.core.blocks.manager import AllocStatus
from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.placement.choice import Here
from scheduler_service.core.planning.running import RunningPlanner
from scheduler_service.core.planning.step import Step, swap_bytes
from scheduler_service.core.planning.waiting import WaitingPlanner
from scheduler_service.core.planning.worker_groups import Session


class SwappedPlanner:
    def __init__(self, session: Session, running: RunningPlanner, admission: WaitingPlanner) -> None:
        self._config = session.config
        self._waiting = session.waiting
        self._balancer = session.balancer
        self._member = session.member
        self._blocks = session.blocks
        self._groups = session.groups
        self._adapters = session.adapters
        self._running = running
        self._admission = admission

    def schedule(self, step: Step, *, are_behind: bool | None = None) -> None:
        """Resume swapped groups while there is room, and while no waiting group outranks them.

        `are_behind`: True for groups that are behind (`SequenceGroup.is_behind`), False for decodes, None for both.
        """
        groups = self._groups
        for group in list(groups.swapped):
            if step.num_preempted or step.budget.is_spent:
                return
            if group in step.queue.slotless:
                continue
            has_adapter_slot = self._adapters.has_slot(group)
            if has_adapter_slot and are_behind is (not group.is_behind):
                return
            status = self._blocks.can_swap_in(group, self._config.largest_chunk, leave_watermark=bool(groups.running))
            if status is AllocStatus.NEVER:
                groups.ignore(group)
                step.ignored.append(group)
                continue
            has_slots = group.num_seqs <= step.budget.num_seqs and has_adapter_slot
            if status is AllocStatus.LATER or not has_slots or self._is_outranked(group, step):
                if not (self._move(group, step) or self._admission.pass_over(group, step)):
                    return
                continue
            if step.queue.is_slotless_overdue:
                return
            self._resume(group, step)

    def _resume(self, group: SequenceGroup, step: Step) -> None:
        self._balancer.overtook(step.queue.slotless)
        step.budget.take(num_seqs=group.num_seqs)
        pairs = self._groups.swap_in(group)
        step.swap_in += pairs
        step.prompts.append(group)
        self._running.schedule_one(group, step)
        step.budget.take(num_bytes=swap_bytes(len(pairs)))

    def _is_outranked(self, swapped: SequenceGroup, step: Step) -> bool:
        """Whether the next waiting group is admitted first. A suspect is not, because it has separate steps. A group
        without its adapter is not: the fetch may have to wait for the swapped group's end."""
        group = step.queue.next if self._admission.admits and self._waiting else None
        if group is None or group.is_suspect or not self._adapters.holds(group.adapter_id):
            return False
        return self._waiting.outranks(group, swapped)

    def _move(self, group: SequenceGroup, step: Step) -> bool:
        """Return a swapped group to the queue if another worker would recompute it in less time than it has been
        swapped out: so it waits at most twice as long as necessary. The required time doubles with each move."""
        offers = self._balancer.offers(member=self._member, group=group, here=Here.IS_FULL, now=step.now)
        placement = self._balancer.choose(member=self._member, group=group, offers=offers, now=step.now)
        record = group.placement
        if placement is None or step.now - record.swapped_at < placement.seconds_there * 2**record.num_moves:
            return False
        record.num_moves += 1
        self._groups.give_back(group)
        self._balancer.num_moved += 1
        step.moved.append(placement)
        return True
