"""Gives a suspect separate steps, so that the streams of other requests go on, and decides when.

A request that was in flight in two consecutive worker losses is a suspect, and runs alone until it has gained a token.
After further losses it must gain more tokens. If there is a worker that was not lost with the suspect, the suspect runs
there before it is ended, because a worker can be the cause, too.
"""

from scheduler_service.core.blocks.manager import AllocStatus
from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.placement.choice import Placement, PlacementReason
from scheduler_service.core.planning.running import RunningPlanner
from scheduler_service.core.planning.step import SchedulingBudget, Step
from scheduler_service.core.planning.waiting import WaitingPlanner
from scheduler_service.core.planning.worker_groups import Session
from scheduler_service.core.queues.waiting_queue import MAX_LEFT
from scheduler_service.core.suspects import rule


class SuspectTurns:
    def __init__(self, session: Session, running: RunningPlanner, admission: WaitingPlanner) -> None:
        self._worker = session.worker
        self._waiting = session.waiting
        self._balancer = session.balancer
        self._member = session.member
        self._groups = session.groups
        self._adapters = session.adapters
        self._running = running
        self._admission = admission

    def next(self, step: Step) -> SequenceGroup | None:
        """The running suspect, or the first waiting suspect that is not left to another worker."""
        if self._groups.accused and (running := self._groups.suspect) is not None:
            return running
        if not (self._admission.admits and self._waiting and self._waiting.head.is_suspect):
            return None
        for group in self._waiting.upcoming(MAX_LEFT, equals=False):
            if not group.is_suspect:
                break
            if not (self._hold(group, step) or self._leave(group, step) or self._admission.pass_over(group, step)):
                return group if step.queue.next is group and self._can_start(group, step) else None
        return None

    def schedule(self, suspect: SequenceGroup, step: Step) -> bool:
        """Plan a step for a suspect alone. Returns whether the step has room."""
        if suspect in self._groups.running:
            step.prompts.append(suspect)
            self._running.schedule_one(suspect, step)
        else:
            self._admission.schedule(step, suspect)
        return bool(step.chunks)

    def _hold(self, suspect: SequenceGroup, step: Step) -> bool:
        """Let a suspect wait if a further loss would prove nothing yet. Returns whether it must wait."""
        if (suspicion := suspect.suspicion) is None:
            return False
        background = self._balancer.background
        missing = rule.missing_control(suspicion, background, step.now)
        if missing:
            step.queue.held[suspect] = background.ahead(step.now, missing)
        return missing > 0.0

    def _leave(self, suspect: SequenceGroup, step: Step) -> bool:
        """Leave a suspect to a better worker, or one where a loss would prove more. Returns whether it is left."""
        if (placement := self._untried(suspect)) is not None:
            # No time limit: after losses on one worker only, request and worker are equally suspect.
            self._balancer.num_left[placement.reason] += 1
            step.queue.leave(placement)
            return True
        if not self._balancer.has_others(self._member):
            return False
        if self._admission.room_for(suspect) is None:
            placement = self._admission.elsewhere(suspect, step)
        else:
            placement = self._admission.here_or_elsewhere(suspect, step)
        return placement is not None and self._admission.leave(placement, step)

    def _untried(self, suspect: SequenceGroup) -> Placement | None:
        """The placement on a worker where a loss would prove more than here: never lost with the suspect, or else not
        lost last. After losses of several workers, no single worker can be the only cause."""
        suspicion = suspect.suspicion
        if suspicion is None or not (most := suspicion.reluctance(self._worker)):
            return None
        others = [(suspicion.reluctance(other.worker), other) for other in self._balancer.other_workers(self._member)]
        least = min((reluctance for reluctance, _ in others), default=most)
        if least >= most:
            return None
        better = [other for reluctance, other in others if reluctance == least]
        to = next((other for other in better if other.room_for(suspect) is not None), better[0])
        return Placement(suspect, PlacementReason.SUSPECT, to=to, num_overtaken=suspect.placement.num_overtaken)

    def _can_start(self, suspect: SequenceGroup, step: Step) -> bool:
        """Whether a waiting suspect would start in a separate step. Otherwise it delays no other group."""
        left = step.budget
        budget = SchedulingBudget(left.num_tokens, left.num_seqs, left.num_bytes, left.num_encoder_tokens)
        budget.take(num_seqs=self._groups.num_running_seqs)
        if self._admission.status(suspect, budget) is not AllocStatus.LATER:
            return True
        if not self._groups.running or not self._adapters.holds(suspect.adapter_id):
            return False
        return self._admission.could_make_room(suspect)
