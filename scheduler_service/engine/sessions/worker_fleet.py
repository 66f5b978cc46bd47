"""State that all workers' loops share, and operators' drains."""

import asyncio
import time
from collections.abc import AsyncIterator

import structlog

from pagewire_common.connection.tls import TlsFolder
from scheduler_service.engine.adapters.adapters import Adapters
from scheduler_service.engine.calls.requests import Requests
from scheduler_service.engine.sessions.agreement import Agreement
from scheduler_service.engine.worker_link.client import WorkerClient
from scheduler_service.engine.workers import Worker, Workers
from scheduler_service.recording.recorder import Recorder
from scheduler_service.settings import SchedulerSettings

log = structlog.get_logger()


class WorkerFleet:
    """Raises StartError for unusable certificates."""

    def __init__(
        self,
        settings: SchedulerSettings,
        workers: Workers,
        requests: Requests,
        adapters: Adapters,
        recorder: Recorder | None,
    ) -> None:
        self.settings = settings
        self.workers = workers
        self.requests = requests
        self.adapters = adapters
        self.recorder = recorder
        self.agreement = Agreement(settings)
        self._worker_tls = TlsFolder(settings.worker_tls) if settings.worker_tls is not None else None

    def connect(self, address: str) -> Worker:
        client = WorkerClient(address, self._worker_tls, self.settings.worker_identity or "")
        return Worker(client, self.settings.max_in_flight_steps)

    def watch_health(self) -> AsyncIterator[bool]:
        return self.workers.outage.watch_health()

    def drain(self, worker: Worker) -> None:
        """After the grace period, the requests move and the session ends."""
        grace = self.settings.grace
        if worker.undrained.is_set():
            log.info("worker drained by an operator", worker=worker.client.address)
            worker.undrained.clear()
            worker.drained_by = time.monotonic() + grace
            asyncio.get_running_loop().call_later(grace, worker.woken.set)
            self.admission_changed(worker)

    def undrain(self, worker: Worker) -> None:
        if not worker.undrained.is_set():
            log.info("worker undrained by an operator", worker=worker.client.address)
            worker.undrained.set()
            worker.drained_by = float("inf")
            self.admission_changed(worker)

    def tell_leaving(self, worker: Worker, is_leaving: bool) -> None:
        if is_leaving != worker.is_leaving:
            log.info("worker is shutting down" if is_leaving else "worker serves again", worker=worker.client.address)
            worker.is_leaving = is_leaving
            self.admission_changed(worker)

    def admission_changed(self, worker: Worker) -> None:
        """A worker begins or ceases to accept requests."""
        if worker.scheduler is not None and worker.scheduler.admits == worker.draining:
            worker.scheduler.set_admission(not worker.draining)
        worker.woken.set()
        self.note_change()

    def note_change(self) -> None:
        was_on = self.workers.outage.is_on
        self.workers.note_change()
        if self.workers.outage.is_on != was_on:
            self.requests.limit_waits()
        self.adapters.settle()
        self.workers.wake()
