"""Most steps are like the one before: every running sequence computes one token.

Such a step reuses the plan of the one before and looks only at which sequences need a block. A sequence that has ended
is taken out of that plan, and one that is ready to decode joins it. A sequence that has to be computed otherwise, is
preempted or is suspected puts an end to it. Only how sequences are computed counts: requests need not be plain, as
log-probabilities are reported by steps of either kind.
"""

from scheduler_service.core.config import PhaseRule
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.outputs import ScheduledSequence
from scheduler_service.core.planning.step import Step
from scheduler_service.core.planning.waiting import WaitingPlanner
from scheduler_service.core.planning.worker_groups import Session


class SteadyPlan:
    """The plan of the next step, if every sequence computes one token in it; sequences that ended may stand in it."""

    def __init__(self, session: Session, admission: WaitingPlanner) -> None:
        self._waiting = session.waiting
        self._blocks = session.blocks
        self._groups = session.groups
        self._admits_meanwhile = session.config.phase_rule is PhaseRule.CHUNKED
        self._admission = admission
        self._plan: list[ScheduledSequence] | None = None

    def forget(self) -> None:
        """The next step has to be planned in full."""
        self._plan = None

    def repeat(self, step: Step) -> bool:
        """Plan a step like the last one, and fill the rest of it from the queue; returns whether that was possible."""
        if self._plan is None:
            return False
        running = SequenceStatus.RUNNING
        plan = [scheduled for scheduled in self._plan if scheduled.sequence.status is running]
        if self._groups.swapped or not 0 < len(plan) <= step.budget.num_tokens:
            return False
        if self._waiting and self._admission.breaks_plan(step.now):
            return False
        needy = [s for s, _, _ in plan if s.num_computed_tokens >= s.num_slots]
        if len(needy) > self._blocks.device.num_free:
            return False
        for sequence in needy:
            self._blocks.append_slots(sequence, 1)
        step.budget.take(num_tokens=len(plan), num_seqs=self._groups.num_running_seqs)
        step.steady, step.needy = plan, needy
        if self._waiting and self._admits_meanwhile:
            self._admission.schedule(step)
        return True

    def look_ahead(self, step: Step) -> None:
        """Now that a step is written, see whether the next one is steady."""
        if step.chunks or step.any_last or not step.steady:
            self._plan = self._next_plan(step)

    def _next_plan(self, step: Step) -> list[ScheduledSequence] | None:
        """The next step, if each sequence just computes one token in it or has computed its last; else None.

        Beams never just go on. Sequences of a group of several may share the block that they write to next, and get
        copies in a step that is planned in full; a single one never does.
        """
        plan = [s for s in step.steady if s.sequence.num_computed_tokens + 1 < s.sequence.max_num_tokens]
        for group in step.chunks if step.steady else self._groups.running:
            prepared = None
            if group.beams is not None:
                return None
            if len(group.sequences) > 1:
                prepared = {chunk.sequence for chunk in step.chunks.get(group, []) if chunk.num_tokens == 1}
            for sequence in group.live:
                num_uncomputed = sequence.num_uncomputed_tokens
                if not sequence.num_known_blocks or group.waits_for_encoder:
                    return None  # the worker has yet to be told of it, because what its encoder reads took the step
                if num_uncomputed == 1 and (prepared is None or sequence in prepared):
                    plan.append(ScheduledSequence(sequence, 1, True))
                elif num_uncomputed or sequence.num_computed_tokens + 1 < sequence.max_num_tokens:
                    return None
        return plan or None
