"""One worker's loop: connect, serve a session, and connect again after its end."""

import asyncio
import logging
import random
import time
import traceback
from collections.abc import Sequence

import structlog

from pagewire_common.epochs import next_epoch
from scheduler_service.core import Scheduler, SchedulerConfig
from scheduler_service.engine.sessions.worker_fleet import WorkerFleet
from scheduler_service.engine.sessions.worker_session import WorkerSession
from scheduler_service.engine.worker_link.errors import DrainedError, SupersededError, UnreachableError, WorkerError
from scheduler_service.engine.workers import Worker, proposer_of
from scheduler_service.wire.codec import WorkerInfo

log = structlog.get_logger()

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 2.0
RETRIES_PER_SECOND = 100
"""Attempts to connect per second, over all workers, at 0.6 ms of CPU time each."""
LONG_RETRY_SECONDS = 30.0
"""Seconds between attempts if another scheduler uses the worker, or if every step fails while others serve."""
FIRST_FAILING_RETRY_SECONDS = 5.0
MAX_OF_A_REASON = 500


class WorkerLoop:
    def __init__(self, fleet: WorkerFleet, worker: Worker) -> None:
        self.worker = worker
        self._fleet = fleet
        self._task: asyncio.Task[None] | None = None
        self._is_lost_in_a_step = False

    def leave(self) -> bool:
        """Do not connect again, and end at once if no session is open. Returns whether the loop has ended."""
        self.worker.is_wanted = False
        if self.worker.scheduler is None and self._task is not None:
            self._task.cancel()
        return self.worker.scheduler is None

    async def run(self) -> None:
        """Serve sessions, with growing pauses, while the worker's address is known."""
        self._task = asyncio.current_task()
        worker, workers = self.worker, self._fleet.workers
        pause = FIRST_RETRY_SECONDS
        while worker.is_wanted:
            await worker.undrained.wait()
            steps_before = worker.num_steps
            self._is_lost_in_a_step = False
            level = logging.WARNING
            longest = max(LAST_RETRY_SECONDS, len(workers.all) / RETRIES_PER_SECOND)
            try:
                await self._serve()
            except WorkerError as error:
                reason = str(error)[:MAX_OF_A_REASON]  # may quote text of any length from the worker
                worker.is_superseded = isinstance(error, SupersededError)
                is_starting = isinstance(error, UnreachableError) and not worker.epoch
                if is_starting or isinstance(error, DrainedError):
                    level = logging.INFO
                # Stack frames refer to failed tasks, the session's scheduler and its requests.
                traceback.clear_frames(error.__traceback__)
            except Exception as error:  # an error in this loop must not stop the other workers' loops
                log.error("worker loop failed", worker=worker.client.address, exc_info=error)
                reason = "internal error; the server's log has the details"
                traceback.clear_frames(error.__traceback__)
            if worker.num_steps > steps_before:
                pause = FIRST_RETRY_SECONDS
            elif self._is_lost_in_a_step and workers.admits:
                # Each further session could make more requests suspects.
                pause, longest = max(pause, FIRST_FAILING_RETRY_SECONDS), LONG_RETRY_SECONDS
            if worker.is_superseded:
                longest = LONG_RETRY_SECONDS
            if reason != worker.last_error:
                log.log(level, "worker unavailable", worker=worker.client.address, reason=reason)
            worker.last_error = reason
            pause = min(pause, longest)
            if worker.is_wanted:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, longest)

    async def _serve(self) -> None:
        fleet, worker = self._fleet, self.worker
        try:
            info, config, held_adapters = await self._prepare()
        except UnreachableError:
            await worker.client.reconnect()
            raise
        self._check_is_available(info)
        worker.instance_id = info.instance_id
        worker.drafts.proposer = proposer_of(info.features)
        worker.epoch = worker.client.epoch
        worker.is_superseded = False
        stream = worker.client.open_session(worker.epoch, worker.split)
        try:
            waiting, address = fleet.requests.waiting, worker.client.address
            if fleet.recorder is None:
                scheduler = Scheduler(config, waiting, address, time.monotonic())
            else:
                scheduler = fleet.recorder.scheduler(config, waiting, address, stream)
        except BaseException:
            stream.close()
            raise
        session = WorkerSession(fleet, worker, stream, scheduler, held_adapters)
        log.info("worker connected", worker=worker.client.address, epoch=worker.epoch, blocks=info.num_device_blocks)
        end: Exception | None = None
        try:
            await session.run(info)
        except Exception as error:
            end = error
            raise
        finally:
            self._is_lost_in_a_step = session.end(end)
            await worker.client.reconnect()

    async def _prepare(self) -> tuple[WorkerInfo, SchedulerConfig, Sequence[str]]:
        fleet, client = self._fleet, self.worker.client
        info = await client.get_info()
        config = await fleet.agreement.accept(client, info)
        if not await client.is_serving(timeout=5):
            raise UnreachableError("the worker is not serving: it is starting or shutting down")
        self._check_is_available(info)
        client.epoch = _next_epoch(info)
        return info, config, await fleet.adapters.check(client, info)

    def _check_is_available(self, info: WorkerInfo) -> None:
        """Raise WorkerError if this scheduler must not end the worker's session.

        A new scheduler takes a worker over. The previous scheduler does not take the worker back: two running
        schedulers would do so in turns, and recompute every request.
        """
        for other in self._fleet.workers.all:
            if other.scheduler is not None and info.instance_id and other.instance_id == info.instance_id:
                raise WorkerError(f"it is the worker that is connected as {other.client.address}")
        if info.in_session and 0 < self.worker.epoch < info.epoch:
            raise SupersededError(
                f"another scheduler has taken the worker, with epoch {info.epoch} after {self.worker.epoch} of this "
                "one; this one waits until that session ends"
            )


def _next_epoch(info: WorkerInfo) -> int:
    try:
        return next_epoch(info.epoch, time.time_ns())
    except ValueError as error:
        raise WorkerError(f"{error}: restart the worker") from None
