"""The state of one worker, over all sessions with it, and its scheduler while one is open."""

import asyncio
import enum
from collections import deque

from scheduler_service.core import Scheduler, SchedulerOutput
from scheduler_service.engine.worker_link.client import WorkerClient
from scheduler_service.engine.worker_link.step_split import StepSplit
from scheduler_service.engine.workers.drafts import Drafts
from scheduler_service.engine.workers.fetch_counts import FetchCounts
from scheduler_service.statistics.counts import STEP_BOUNDS, Histogram


class WorkerStatus(enum.StrEnum):
    """The status of a worker."""

    CONNECTING = enum.auto()
    """No session is open, and the loop tries again and again to open one; `last_error` says why there is none."""
    SERVING = enum.auto()
    DRAINING = enum.auto()
    """The worker finishes its requests and is given no more."""
    DRAINED = enum.auto()
    """An operator drained it, and it has nothing left; no session is open."""
    SUPERSEDED = enum.auto()
    """Another scheduler has a session with the worker; this scheduler waits until that session has ended."""


class Worker:
    """One worker, at most `most_in_flight` of whose steps are sent ahead of their answers."""

    def __init__(self, client: WorkerClient, most_in_flight: int) -> None:
        self.client = client
        self.scheduler: Scheduler | None = None
        self.epoch = 0
        self.num_steps = 0
        self.split = StepSplit()  # of all sessions
        self.step_tokens = Histogram(STEP_BOUNDS)  # of all sessions
        self.num_preemptions = 0  # of earlier sessions
        self.num_losses = 0  # sessions that ended otherwise than by being drained
        self.fetch_counts = FetchCounts()  # of all sessions
        self.drafts = Drafts()  # of all sessions
        self.is_wanted = True
        """Whether to connect again when the session is over."""
        self.last_error = "not connected yet"
        self.instance_id = ""
        self.in_flight: deque[SchedulerOutput] = deque()
        """Steps that were sent and not answered."""
        self.woken = asyncio.Event()
        """Set when there may be something to send."""
        self.is_leaving = False
        """Whether the worker said that it shuts down."""
        self.is_superseded = False
        self.undrained = asyncio.Event()
        self.undrained.set()
        self.drained_by = float("inf")
        """When requests that are left after an operator's drain move elsewhere."""
        self._most_in_flight = most_in_flight

    @property
    def draining(self) -> bool:
        """Whether it is given no more requests, because it shuts down or an operator has drained it."""
        return self.is_leaving or not self.undrained.is_set()

    @property
    def admits(self) -> bool:
        """Whether it takes requests."""
        return self.scheduler is not None and not self.draining

    @property
    def state(self) -> WorkerStatus:
        if self.draining:
            return WorkerStatus.DRAINED if self.scheduler is None else WorkerStatus.DRAINING
        if self.scheduler is not None:
            return WorkerStatus.SERVING
        return WorkerStatus.SUPERSEDED if self.is_superseded else WorkerStatus.CONNECTING

    @property
    def may_send(self) -> bool:
        """Whether another step may be in flight."""
        return len(self.in_flight) < self._most_in_flight

    def wake(self) -> None:
        """Look again whether there is something to send. Nothing happens while no further step may be in flight."""
        if self.may_send:
            self.woken.set()
