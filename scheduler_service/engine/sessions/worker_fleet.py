"""The state that the loops of all workers share, and the changes when a worker joins, leaves or is drained."""

import asyncio
import time
from collections.abc import AsyncIterator

import structlog

from pagewire_common.connection.tls import TlsFolder
from scheduler_service.engine.adapters.adapters import Adapters
from scheduler_service.engine.calls.requests import Requests
from scheduler_service.engine.sessions.agreement import Agreement
from scheduler_service.engine.worker_link.client import WorkerClient
from scheduler_service.engine.workers.worker import Worker
from scheduler_service.engine.workers.workers import Workers
from scheduler_service.recording.recorder import NoRecorder
from scheduler_service.settings import SchedulerSettings

log = structlog.get_logger()


class WorkerFleet:
    """All workers, their requests and adapters, and the operators' actions on workers.

    Raises StartError for certificates that cannot be used.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        workers: Workers,
        requests: Requests,
        adapters: Adapters,
        recorder: NoRecorder,
    ) -> None:
        self.settings = settings
        self.workers = workers
        self.requests = requests
        self.adapters = adapters
        self.recorder = recorder
        self.agreement = Agreement(settings)
        self._worker_tls = TlsFolder(settings.worker_tls) if settings.worker_tls is not None else None

    def connect(self, address: str) -> Worker:
        """Create a worker with a channel that the settings configure."""
        client = WorkerClient(address, self._worker_tls, self.settings.worker_identity or "")
        return Worker(client, self.settings.max_in_flight_steps)

    def watch_health(self) -> AsyncIterator[bool]:
        """Yield whether clients should send requests to this server. The first value is yielded as soon as a worker
        serves, further values after each change.
        """
        return self.workers.outage.watch_health()

    def drain(self, worker: Worker) -> None:
        """Drain a worker: send no new requests to the worker. After the grace period, move the remaining requests to
        other workers and close the session.
        """
        grace = self.settings.grace
        if worker.undrained.is_set():
            log.info("worker drained by an operator", worker=worker.client.address)
            worker.undrained.clear()
            worker.drained_by = time.monotonic() + grace
            asyncio.get_running_loop().call_later(grace, worker.woken.set)
            self.admission_changed(worker)

    def undrain(self, worker: Worker) -> None:
        """Undrain a worker: send new requests to the worker again."""
        if not worker.undrained.is_set():
            log.info("worker undrained by an operator", worker=worker.client.address)
            worker.undrained.set()
            worker.drained_by = float("inf")
            self.admission_changed(worker)

    def tell_leaving(self, worker: Worker, is_leaving: bool) -> None:
        """Record whether the worker reports that it is shutting down."""
        if is_leaving != worker.is_leaving:
            log.info("worker is shutting down" if is_leaving else "worker serves again", worker=worker.client.address)
            worker.is_leaving = is_leaving
            self.admission_changed(worker)

    def admission_changed(self, worker: Worker) -> None:
        """Called when a worker, with or without a session, begins or ceases to accept requests."""
        if worker.scheduler is not None and worker.scheduler.admits == worker.draining:
            worker.scheduler.set_admission(not worker.draining)
        worker.woken.set()
        self.note_change()

    def note_change(self) -> None:
        """Called when a session began or ended, or a worker was drained or undrained."""
        was_on = self.workers.outage.is_on
        self.workers.note_change()
        if self.workers.outage.is_on != was_on:
            self.requests.limit_waits()
        self.adapters.settle()
        self.workers.wake()
