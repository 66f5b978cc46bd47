"""Plans steady steps, in which every running sequence computes one token, by repeating the plan of the step before.

Most steps are steady. A steady step reuses the plan of the step before, and only checks which sequences need another
block. A sequence that has ended leaves the plan. A sequence that becomes ready to decode joins the plan. The plan is no
longer repeated if a sequence must compute several tokens, is preempted, or is suspected. Sequences with
log-probabilities can be in the plan, because steady steps report log-probabilities too.
"""

from scheduler_service.core.config import PhaseRule
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.outputs import ScheduledSequence
from scheduler_service.core.planning.step import Step
from scheduler_service.core.planning.waiting import WaitingPlanner
from scheduler_service.core.planning.worker_groups import Session


class SteadyPlan:
    """The plan of the next step, if every sequence computes one token in it. The plan may contain sequences that have
    ended."""

    def __init__(self, session: Session, admission: WaitingPlanner) -> None:
        self._waiting = session.waiting
        self._blocks = session.blocks
        self._groups = session.groups
        self._admits_meanwhile = session.config.phase_rule is PhaseRule.CHUNKED
        self._admission = admission
        self._plan: list[ScheduledSequence] | None = None

    def forget(self) -> None:
        """Forget the plan, so that the next step is planned in full."""
        self._plan = None

    def repeat(self, step: Step) -> bool:
        """Repeat the last plan in this step, and admit waiting groups to the rest of the step. Returns whether the last
        plan could be repeated."""
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
        """After a step is written, check whether the next step is steady."""
        if step.chunks or step.any_last or not step.steady:
            self._plan = self._next_plan(step)

    def _next_plan(self, step: Step) -> list[ScheduledSequence] | None:
        """The plan of the next step; None if the next step is not steady.

        In a steady step each sequence computes one token; sequences that computed their last token are left out. A step
        with beams is never steady. Sequences of the same group may share the block that they write to next. These
        sequences join the plan only after a fully planned step has copied the shared block. If a group has a single
        sequence, this sequence never shares the block that it writes to next.
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
                    return None  # the worker does not know the sequence yet: the encoder's input filled the step
                if num_uncomputed == 1 and (prepared is None or sequence in prepared):
                    plan.append(ScheduledSequence(sequence, 1, True))
                elif num_uncomputed or sequence.num_computed_tokens + 1 < sequence.max_num_tokens:
                    return None
        return plan or None
