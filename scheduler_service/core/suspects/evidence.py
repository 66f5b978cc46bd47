"""Stores evidence about requests in their `Suspicion`, from a worker's answers and from its loss."""

from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.groups.suspicion import Suspicion
from scheduler_service.core.outputs import SchedulerOutput
from scheduler_service.core.planning.worker_groups import Session, groups_in
from scheduler_service.core.suspects import rule

# A worker counts as failed if a step takes MAX_OVERDUE times its expected time and at least OVERDUE_SECONDS. A failed
# worker may count as lost much later, but its time after the failure is not serving time.
MAX_OVERDUE = 4
OVERDUE_SECONDS = 1.0


class Evidence:
    """Counts a session's seconds in favour of the requests in flight, and the session's loss against these requests."""

    def __init__(self, session: Session) -> None:
        self._worker = session.worker
        self._member = session.member
        self._balancer = session.balancer
        self._groups = session.groups
        self._in_flight = session.in_flight

    def join(self, now: float) -> None:
        """Note that the worker's session begins."""
        self._balancer.background.join(now)

    def answered(self, output: SchedulerOutput, seconds: float) -> None:
        """Count the seconds of an answered step for the accused requests in the step. A request is accused if it was in
        flight when a worker was lost."""
        in_step = groups_in(output)
        for group in self._groups.accused:
            if group in in_step:
                assert group.suspicion is not None
                group.suspicion.run(max(0.0, seconds), alone=len(in_step) == 1)

    def lost(self, now: float, *, blames: bool) -> list[SequenceGroup]:
        """Judge the requests that were in flight when the worker was lost. Returns a list with the group that was ended
        as the cause of the loss, or an empty list.

        If `blames` is true, the loss counts against the requests of all steps in flight, including requests that were
        preempted since. Requests that have ended, or are on another worker now, are not judged. While there are other
        workers, no group is ended for the losses of a single worker.
        """
        outputs = self._in_flight.outputs
        seconds = self._seconds_in_flight(now)
        self._balancer.background.leave(self._in_flight.began_at + seconds if outputs else now, is_lost=blames)
        in_step = dict.fromkeys(group for output in (outputs if blames else ()) for group in groups_in(output))
        is_only = not self._balancer.other_workers(self._member)
        ended: list[SequenceGroup] = []
        for group in in_step:
            if self._groups.find(group.request_id) is not group:
                continue
            suspicion = group.suspicion = group.suspicion or Suspicion()
            alone = len(in_step) == 1
            is_blamed = rule.lose(
                suspicion, self._balancer.background, worker=self._worker, seconds=seconds, now=now, alone=alone
            )
            if is_blamed and (is_only or len(suspicion.lost_on) > 1):
                error = (
                    f"{suspicion.num_losses} workers failed in a row while computing this request, which is more than "
                    "coincidence explains"
                )
                self._groups.finish(group, SequenceStatus.FINISHED_ABORTED, error)
                ended.append(group)
        return ended

    def _seconds_in_flight(self, now: float) -> float:
        """If the worker is lost now, the seconds that it may have computed its steps in flight; see MAX_OVERDUE."""
        if not self._in_flight.outputs:
            return 0.0
        expected = self._balancer.times.seconds(self._in_flight.num_tokens)
        most = max(OVERDUE_SECONDS, MAX_OVERDUE * expected * 1000 / self._member.speed)
        return min(max(0.0, now - self._in_flight.began_at), most)
