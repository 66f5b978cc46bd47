"""Stores evidence about requests in their `Suspicion`, from a worker's answers and from its loss."""

from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.groups.suspicion import Suspicion
from scheduler_service.core.outputs import SchedulerOutput
from scheduler_service.core.planning.worker_groups import Session, groups_in
from scheduler_service.core.suspects import rule

# A step that takes MAX_OVERDUE times its expected time and OVERDUE_SECONDS has failed; later time is not serving time.
MAX_OVERDUE = 4
OVERDUE_SECONDS = 1.0


class Evidence:
    def __init__(self, session: Session) -> None:
        self._worker = session.worker
        self._member = session.member
        self._balancer = session.balancer
        self._groups = session.groups
        self._in_flight = session.in_flight

    def join(self, now: float) -> None:
        self._balancer.background.join(now)

    def answered(self, output: SchedulerOutput, seconds: float) -> None:
        """Count the seconds of an answered step for the accused requests in it."""
        in_step = groups_in(output)
        for group in self._groups.accused:
            if group in in_step:
                assert group.suspicion is not None
                group.suspicion.run(max(0.0, seconds), alone=len(in_step) == 1)

    def lost(self, now: float, *, blames: bool) -> list[SequenceGroup]:
        """Judge the requests in flight if `blames`, even those that were preempted since. Returns the groups that were
        ended.

        While there are other workers, the losses of a single worker end no group.
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
        """Seconds that a worker that is lost now may have computed its steps; see MAX_OVERDUE."""
        if not self._in_flight.outputs:
            return 0.0
        expected = self._balancer.times.seconds(self._in_flight.num_tokens)
        most = max(OVERDUE_SECONDS, MAX_OVERDUE * expected * 1000 / self._member.speed)
        return min(max(0.0, now - self._in_flight.began_at), most)
