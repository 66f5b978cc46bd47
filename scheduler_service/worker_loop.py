"""One worker's loop: connect, plan, send, receive, publish; and connect again when the stream breaks.

While a session is open one task plans and sends steps, up to a few ahead of their answers, and another takes the
answers in, so that the worker finds its next step waiting when it has finished one.
"""

import asyncio
import enum
import logging
import random
import time
from collections import deque
from collections.abc import Coroutine
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from scheduler_service.codec import WorkerInfo
from scheduler_service.core import Scheduler, SchedulerConfig, SchedulerOutput
from scheduler_service.settings import SchedulerSettings
from scheduler_service.step_split import StepSplit
from scheduler_service.worker_client import Session, WorkerClient, WorkerError

if TYPE_CHECKING:
    from scheduler_service.engine import Engine

log = structlog.get_logger()

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 5.0


class WorkerStatus(enum.StrEnum):
    """Where a worker stands, in one word."""

    CONNECTING = enum.auto()
    """No session is open, and one is tried for again and again; `last_error` says why there is none."""
    SERVING = enum.auto()
    DRAINING = enum.auto()
    """It finishes what it has and is given nothing more."""
    DRAINED = enum.auto()
    """An operator drained it, and it has nothing left; no session is open."""


class WorkerLoop:
    """One worker: its connection and, while a session is open, its scheduler."""

    def __init__(self, engine: "Engine", address: str) -> None:
        self.client = WorkerClient(address)
        self.scheduler: Scheduler | None = None
        self.epoch = 0
        self.num_steps = 0
        self.split = StepSplit()  # of all sessions
        self.num_preemptions = 0  # of earlier sessions
        self.num_losses = 0  # sessions that ended otherwise than by being drained
        self.draining = False
        self.last_error = "not connected yet"
        self._engine = engine
        self._wake = asyncio.Event()
        self._in_flight: deque[SchedulerOutput] = deque()  # steps that were sent and not answered

    @property
    def state(self) -> WorkerStatus:
        if self.draining:
            return WorkerStatus.DRAINED if self.scheduler is None else WorkerStatus.DRAINING
        return WorkerStatus.CONNECTING if self.scheduler is None else WorkerStatus.SERVING

    def wake(self) -> None:
        self._wake.set()

    def drain(self) -> None:
        """Give the worker nothing more."""
        self.draining = True
        if self.scheduler is not None:
            self.scheduler.set_admission(False)

    def undrain(self) -> None:
        """Take that back."""
        self.draining = False
        if self.scheduler is not None:
            self.scheduler.set_admission(True)
        self.wake()

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
        try:
            config = _config(settings, info)
        except ValueError as error:
            raise WorkerError(f"it cannot be scheduled: {error}") from error
        self.epoch = max(time.time_ns(), info.epoch + 1)
        session = self.client.open_session(self.epoch, self.split)
        recorder = self._engine.recorder
        self.scheduler = scheduler = recorder.scheduler(config, self._engine.waiting, self.client.address, session)
        log.info("worker connected", worker=self.client.address, epoch=self.epoch, blocks=info.num_device_blocks)
        self._in_flight.clear()
        try:
            await _until_one_fails(self._send_steps(scheduler, session), self._receive_answers(scheduler, session))
        finally:
            self.scheduler = None
            session.close()
            for group in scheduler.release_all():
                self._engine.fail(group)
            self.num_preemptions += sum(scheduler.num_preemptions.values())
            self._engine.connection_lost()
            self._engine.wake()

    async def _send_steps(self, scheduler: Scheduler, session: Session) -> None:
        most_in_flight = self._engine.settings.max_in_flight_steps
        while True:
            self._wake.clear()
            if len(self._in_flight) < most_in_flight:
                began = perf_counter_ns()
                output = scheduler.schedule(time.monotonic())
                self.split.schedule += perf_counter_ns() - began
                for group in output.ignored:
                    self._engine.fail(group)
                if output.preempted:
                    self._engine.wake()  # another worker may have room for them
                if not output.is_empty:
                    self._in_flight.append(output)
                    await session.send(output)
                    continue
            await self._wake.wait()

    async def _receive_answers(self, scheduler: Scheduler, session: Session) -> None:
        while True:
            answer = await session.receive()
            output = self._in_flight.popleft()
            began = perf_counter_ns()
            try:
                gained = scheduler.update_from_output(output, answer, time.monotonic())
            except ValueError as error:
                raise WorkerError(str(error)) from error
            self.num_steps += 1
            updated = perf_counter_ns()
            self.split.update += updated - began
            self._engine.publish(scheduler, gained)
            self.split.publish += perf_counter_ns() - updated
            if self._engine.settings.check_invariants:
                scheduler.blocks.check()
            self.wake()


async def _until_one_fails(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run coroutines that never end side by side; raises what the first of them raises, when all have stopped."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        failed, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in failed:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
        sliding_window=info.sliding_window,
        prefix_caching=settings.prefix_caching,
        phase_rule=settings.phase_rule,
        delay_factor=settings.delay_factor,
        preemption_mode=settings.preemption_mode,
        block_bytes=info.block_bytes,
        swap_bytes_per_second=info.swap_bytes_per_second,
        prefill_tokens_per_second=info.prefill_tokens_per_second,
    )
