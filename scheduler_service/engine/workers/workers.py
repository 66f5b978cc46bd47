"""All currently known workers, whether connected or not, and outages.

In an outage requests wait for a limited time, and the server's health stays SERVING for the same time. During this time
new requests are accepted, because a worker may return in a moment. If the health changed at once, the load balancer
would send no calls to this server, and a short outage would cause errors. When waiting requests begin to end with
UNAVAILABLE, the health becomes NOT_SERVING, and clients should use other servers.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc
import structlog

from pagewire_common.calls.errors import RequestError
from scheduler_service.core import Scheduler, SchedulerOutput, SequenceStatus, WorkerScheduler
from scheduler_service.engine.workers.worker import Worker

log = structlog.get_logger()


class Outage:
    """Tells whether an outage lasts at this moment. `set` begins or ends the outage. At the start of the server an
    outage lasts until the first worker accepts requests.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._began, self._ended = asyncio.Event(), asyncio.Event()
        self._began.set()

    @property
    def is_on(self) -> bool:
        return self._began.is_set()

    def set(self, is_on: bool) -> None:
        if is_on == self.is_on:
            return
        begins, ends = (self._began, self._ended) if is_on else (self._ended, self._began)
        begins.set()
        ends.clear()

    async def watch_health(self) -> AsyncIterator[bool]:
        """Yield whether clients should send requests to this server. The first value is True, and comes as soon as a
        worker serves. A further value comes after each change.
        """
        while True:
            await self._ended.wait()
            yield True
            while await self._ends_in_time(self._patience):
                pass
            yield False

    async def lasts(self, seconds: float) -> None:
        """Return when an outage has lasted for `seconds`. The seconds count from this call, or from the outage's begin
        if the outage begins later.
        """
        while await self._ends_in_time(seconds):
            pass

    async def _ends_in_time(self, seconds: float) -> bool:
        """Wait for an outage to begin and to end. Returns False if the outage lasts longer than `seconds`."""
        await self._began.wait()
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            return False
        return True


MAX_WORKERS = 3
"""Maximum number of workers whose reasons an error lists."""
UNSERVED_SECONDS = 2.5
"""Seconds without a worker, after which a shutdown no longer waits for a worker. Attempts to connect to a worker are at
most 2 s apart.
"""


@dataclass(slots=True)
class Departed:
    """Sums over workers that have left. Without the sums of departed workers, the totals of all workers would fall."""

    num_losses: int = 0
    num_preemptions: int = 0
    num_steps: int = 0

    def add(self, worker: Worker) -> None:
        self.num_losses += worker.num_losses
        self.num_preemptions += worker.num_preemptions
        self.num_steps += worker.num_steps


class Workers:
    """Workers by address. `targets` are the configured names and addresses. A request waits at most `patience` seconds
    for a worker.
    """

    def __init__(self, targets: Sequence[str], patience: float) -> None:
        self._targets = targets
        self._by_address: dict[str, Worker] = {}
        self.serving: dict[WorkerScheduler, Worker] = {}
        """Workers with an open session, by scheduler."""
        self.departed = Departed()
        self.outage = Outage(patience)
        """An outage that lasts while no worker accepts requests."""
        self.absence = Outage(UNSERVED_SECONDS)
        """An outage that lasts while no worker has a session."""

    @property
    def all(self) -> list[Worker]:
        return list(self._by_address.values())

    def add(self, worker: Worker) -> None:
        self._by_address[worker.client.address] = worker

    def remove(self, worker: Worker) -> None:
        del self._by_address[worker.client.address]

    def find(self, address: str) -> Worker:
        """The worker at an address. Raises NOT_FOUND for an unknown address."""
        if (worker := self._by_address.get(address)) is None:
            known = ", ".join(sorted(self._by_address)) or "none"
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"there is no worker {address!r}; known: {known}")
        return worker

    @property
    def admits(self) -> bool:
        """Whether any worker accepts requests."""
        return any(worker.admits for worker in self._by_address.values())

    def note_change(self) -> None:
        """A session began or ended, or a worker was drained or undrained."""
        self.outage.set(not self.admits)
        self.absence.set(not self.serving)

    def why_unserved(self) -> str:
        """The reason why no worker accepts requests, as text for a client whose request waited in vain."""
        if not self._by_address:
            return f"none is found at {', '.join(self._targets)}"
        workers = self.all
        reasons = [
            f"{worker.client.address}: {'it is drained or shuts down' if worker.draining else worker.last_error}"
            for worker in workers[:MAX_WORKERS]
        ]
        left = len(workers) - len(reasons)
        return "; ".join([*reasons, *([f"and {left} more"] if left else [])])

    # ---- the workers' schedulers

    @property
    def schedulers(self) -> list[Scheduler]:
        """The schedulers of open sessions."""
        return [worker.scheduler for worker in self._by_address.values() if worker.scheduler is not None]

    def wake(self) -> None:
        """Have every worker's loop check whether a step can be sent."""
        for worker in self._by_address.values():
            worker.wake()

    def wake_for(self, output: SchedulerOutput) -> None:
        """Wake the workers to which a step of another worker has left requests."""
        for placement in (*output.moved, *output.placements):
            if placement.to is not None:
                self.serving[placement.to].wake()

    def finish(self, request_id: str, status: SequenceStatus) -> bool:
        """End a request, in the waiting queue or on a worker. Returns whether a session contained the request."""
        return any(scheduler.finish_requests([request_id], status) for scheduler in self.schedulers)

    def reset_prefix_cache(self) -> int:
        """Clear the prefix cache. Requests in flight continue. Returns the number of blocks that were cached."""
        num_blocks = sum(scheduler.reset_prefix_cache() for scheduler in self.schedulers)
        log.info("prefix cache emptied by an operator", blocks=num_blocks)
        return num_blocks
