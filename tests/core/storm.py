"""A fleet whose workers are killed, in virtual time, around the real core.

Steps take `step_seconds`, two are in flight, and killed workers return later. A poison ends the worker that computes
it.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from random import Random

from fake_worker import FakeWorker
from scheduler_helpers import make_scheduler

from scheduler_service.core import ModelOutput, Scheduler, SchedulerOutput, SequenceGroup, WaitingQueue

Kills = Callable[[SequenceGroup, int, int], bool]
"""Whether a step ends its worker, by group, its computed tokens after the step, and its tokens at admission."""


def step_seconds(output: SchedulerOutput) -> float:
    return 0.01 + 0.0002 * output.num_tokens


class Session:
    """One worker while it is up."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.worker = FakeWorker(scheduler.config)
        self.in_flight: list[tuple[SchedulerOutput, ModelOutput | None]] = []
        self.came_with: dict[SequenceGroup, int] = {}  # tokens
        self.busy_until = 0.0
        self.is_up = True


class Storm:
    """`restart` and `kill_every` are in seconds; each kill hits one of the workers, up or not."""

    def __init__(
        self,
        random: Random,
        num_workers: int,
        *,
        kills: Kills = lambda *_: False,
        restart: float = 6.0,
        kill_every: Callable[[], float] | None = None,
        storm_from: float = 0.0,
        most_requests: int = 24,
        **sizes: object,
    ) -> None:
        self.random = random
        self.waiting = WaitingQueue()
        self.now = 0.0
        self.num_losses = 0
        self.ended: list[SequenceGroup] = []
        self._kills = kills
        self._restart = restart
        self._kill_every = kill_every
        self._sizes = {
            "num_device_blocks": 2000,
            "max_num_seqs": 32,
            "max_model_len": 400,
            "max_num_batched_tokens": 256,
            "block_size": 8,
        } | sizes
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._most_requests = most_requests
        self._sessions: list[Session | None] = [None] * num_workers
        for number in range(num_workers):
            self._start(number)
        if kill_every is not None:
            self._at(storm_from + kill_every(), self._strike)

    def run(self, groups: Sequence[SequenceGroup], until: Callable[[], bool] = lambda: False) -> None:
        """Keep up to `most_requests` groups in flight, until all have finished or `until`."""
        arrivals, here = list(reversed(groups)), list[SequenceGroup]()
        while not until():
            here = [group for group in here if not group.is_finished]
            while arrivals and len(here) < self._most_requests:
                here.append(arrivals.pop())
                self.waiting.append(here[-1])
                self._ask_all()
            if not here:
                return
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _start(self, number: int) -> None:
        scheduler = make_scheduler(self.waiting, f"worker {number}", now=self.now, **self._sizes)
        self._sessions[number] = Session(scheduler)
        self._ask_all()

    def _strike(self) -> None:
        assert self._kill_every is not None
        self._lose(self.random.randrange(len(self._sessions)))
        self._at(self.now + self._kill_every(), self._strike)

    def _lose(self, number: int) -> None:
        session, self._sessions[number] = self._sessions[number], None
        if session is None:
            return  # it is starting, and does so for no longer
        session.is_up = False
        self.num_losses += 1
        self.ended += session.scheduler.release_all(self.now)
        self._at(self.now + self._restart, lambda: self._start(number))
        self._ask_all()

    def _ask_all(self) -> None:
        for number, session in enumerate(self._sessions):
            if session is not None:
                self._ask(number, session)

    def _ask(self, number: int, session: Session) -> None:
        while session.is_up and len(session.in_flight) < 2:
            output = session.scheduler.schedule(self.now)
            if output.is_empty:
                if output.ask_again_at is not None:
                    self._at(max(output.ask_again_at, self.now + 0.001), lambda: self._ask(number, session))
                return
            for new in output.new_sequences:
                session.came_with[new.sequence.group] = len(new.sequence.token_ids)
            is_fatal = any(answer is None for _, answer in session.in_flight) or any(
                self._kills(s.group, s.num_computed_tokens, session.came_with[s.group]) for s, _, _ in output.scheduled
            )
            session.in_flight.append((output, None if is_fatal else session.worker.execute(output)))
            session.busy_until = max(session.busy_until, self.now) + step_seconds(output)
            self._at(session.busy_until, lambda: self._answer(number, session))

    def _answer(self, number: int, session: Session) -> None:
        if not session.is_up:
            return
        output, answer = session.in_flight[0]
        if answer is None:
            self._lose(number)
            return
        del session.in_flight[0]
        session.scheduler.update_from_output(output, answer, self.now)
        self._ask_all()
