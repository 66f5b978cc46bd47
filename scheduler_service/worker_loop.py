"""One worker's loop: connect, plan, send, receive, publish; and connect again when the stream breaks."""

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING

import grpc
import structlog

from scheduler_service.codec import WorkerInfo
from scheduler_service.core import Scheduler, SchedulerConfig, SchedulerOutput
from scheduler_service.settings import SchedulerSettings
from scheduler_service.worker_client import Session, WorkerClient, WorkerError

if TYPE_CHECKING:
    from scheduler_service.engine import Engine

log = structlog.get_logger()

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 5.0


class WorkerLoop:
    """One worker: its connection and, while a session is open, its scheduler."""

    def __init__(self, engine: "Engine", address: str) -> None:
        self.client = WorkerClient(address)
        self.scheduler: Scheduler | None = None
        self.epoch = 0
        self.num_steps = 0
        self.num_preemptions = 0  # of earlier sessions
        self.last_error = "not connected yet"
        self._engine = engine
        self._wake = asyncio.Event()
        self._in_flight: SchedulerOutput | None = None  # the step that was sent and not answered

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Connect, serve, and connect again after a pause that grows, for ever."""
        pause = FIRST_RETRY_SECONDS
        while True:
            steps_before = self.num_steps
            level = logging.WARNING
            try:
                await self._serve()
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                if not self.epoch:  # it is still starting
                    level = logging.INFO
            except WorkerError as error:
                reason = str(error)
            except Exception as error:  # whatever it is, the other workers and everybody's streams go on
                log.error("worker loop failed", worker=self.client.address, exc_info=error)
                reason = "internal error; the server's log has the details"
            if self.num_steps > steps_before:
                pause = FIRST_RETRY_SECONDS
            if reason != self.last_error:
                log.log(level, "worker unavailable", worker=self.client.address, reason=reason)
            self.last_error = reason
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LAST_RETRY_SECONDS)

    async def _serve(self) -> None:
        info = await self.client.get_info()
        await self._engine.accept(self.client, info)
        settings = self._engine.settings
        scheduler = Scheduler(_config(settings, info), self._engine.waiting)
        self.epoch = max(time.time_ns(), info.epoch + 1)
        session = self.client.open_session(self.epoch)
        session.when_broken(self.wake)
        self.scheduler = scheduler
        log.info("worker connected", worker=self.client.address, epoch=self.epoch, blocks=info.num_device_blocks)
        self._in_flight = None
        try:
            while True:
                await self._step(scheduler, session)
        finally:
            self.scheduler = None
            session.close()
            for group in scheduler.release_all(self._in_flight):
                self._engine.fail(group)
            self.num_preemptions += sum(scheduler.num_preemptions.values())
            self._engine.connection_lost()
            self._engine.wake()

    async def _step(self, scheduler: Scheduler, session: Session) -> None:
        self._wake.clear()
        output = scheduler.schedule(time.monotonic())
        for group in output.ignored:
            self._engine.fail(group)
        if output.is_empty and not session.is_broken:
            await self._wake.wait()
            return
        if output.preempted:
            self._engine.wake()  # another worker may have room for them
        self._in_flight = output
        answer = await session.execute(output)
        try:
            gained = scheduler.update_from_output(output, answer, time.monotonic())
        except ValueError as error:
            raise WorkerError(str(error)) from error
        self._in_flight = None
        self.num_steps += 1
        self._engine.publish(scheduler, gained)
        if self._engine.settings.check_invariants:
            scheduler.blocks.check()


def _config(settings: SchedulerSettings, info: WorkerInfo) -> SchedulerConfig:
    max_num_batched_tokens = min(settings.max_num_batched_tokens, info.max_num_batched_tokens)
    return SchedulerConfig(
        block_size=info.block_size,
        num_device_blocks=info.num_device_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=min(settings.max_num_seqs, info.max_num_seqs, max_num_batched_tokens),
        max_model_len=info.max_model_len,
        watermark=settings.watermark,
        num_host_blocks=info.num_host_blocks,
        prefix_caching=settings.prefix_caching,
        phase_rule=settings.phase_rule,
        delay_factor=settings.delay_factor,
        preemption_mode=settings.preemption_mode,
        block_bytes=info.block_bytes,
        swap_bytes_per_second=info.swap_bytes_per_second,
        prefill_tokens_per_second=info.prefill_tokens_per_second,
    )
