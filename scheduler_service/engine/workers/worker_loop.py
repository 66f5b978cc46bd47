"""One worker's loop: connect, plan, send, receive, publish; and connect again when the session is over.

While a session is open one task plans and sends steps, up to a few ahead of their answers, and another takes the
answers in, so that the worker finds its next step waiting when it has finished one. Other tasks watch over the worker.
The first task that fails ends the session, and the requests that ran there go on elsewhere.
"""

import asyncio
import contextlib
import enum
import logging
import random
import time
import traceback
from collections import deque
from collections.abc import Coroutine, Sequence
from time import perf_counter_ns
from typing import Any, Protocol

import structlog

from pagewire_common.epochs import next_epoch
from scheduler_service.core import (
    PreemptionMode,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceGroup,
    SequenceOutput,
    WaitingQueue,
    WorkerScheduler,
)
from scheduler_service.engine.adapters.adapter_fetcher import AdapterFetcher, FetchCounts
from scheduler_service.engine.adapters.adapters import Adapters
from scheduler_service.engine.worker_link.client import (
    DrainedError,
    Session,
    SupersededError,
    UnreachableError,
    WorkerClient,
    WorkerError,
)
from scheduler_service.engine.worker_link.limits import step_timeout
from scheduler_service.engine.worker_link.step_split import StepSplit
from scheduler_service.engine.worker_link.watch import watch_health, watch_leaving, watch_steps
from scheduler_service.engine.workers.answer_check import check_answer
from scheduler_service.engine.workers.guesses import Guesses, proposer_of
from scheduler_service.recording.recorder import NoRecorder
from scheduler_service.settings import SchedulerSettings
from scheduler_service.statistics.counts import STEP_BOUNDS, Histogram
from scheduler_service.wire.codec import WorkerInfo

log = structlog.get_logger()

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 2.0
RETRIES_PER_SECOND = 100
"""Of all workers together: an attempt costs 0.6 ms, and of thousands of addresses most may be dead."""
LONG_RETRY_SECONDS = 30.0
"""Between attempts at a worker that another scheduler has, or that fails in every step while others serve."""
FIRST_FAILING_RETRY_SECONDS = 5.0
MOST_OF_A_REASON = 500


class WorkerStatus(enum.StrEnum):
    """The status of a worker."""

    CONNECTING = enum.auto()
    """No session is open, and the loop tries again and again to open one; `last_error` says why there is none."""
    SERVING = enum.auto()
    DRAINING = enum.auto()
    """It finishes its requests and is given no more."""
    DRAINED = enum.auto()
    """An operator drained it, and it has nothing left; no session is open."""
    SUPERSEDED = enum.auto()
    """Another scheduler has a session with the worker; this scheduler waits until that session has ended."""


class Fleet(Protocol):
    """What the loop of one worker needs of all workers, and of the requests that they compute."""

    @property
    def settings(self) -> SchedulerSettings: ...

    @property
    def waiting(self) -> WaitingQueue: ...

    @property
    def recorder(self) -> NoRecorder: ...

    @property
    def adapters(self) -> Adapters: ...

    @property
    def serving(self) -> "dict[WorkerScheduler, WorkerLoop]":
        """By the schedulers of open sessions."""

    @property
    def workers(self) -> "list[WorkerLoop]":
        """The workers that are known at the moment, connected or not."""

    @property
    def admits(self) -> bool:
        """Whether any worker takes requests."""

    def connect(self, address: str) -> WorkerClient:
        """A channel to a worker."""

    async def accept(self, client: WorkerClient, info: WorkerInfo) -> SchedulerConfig:
        """Check that a worker serves what the others serve. Raises WorkerError."""

    def admitted(self, output: SchedulerOutput) -> None:
        """Take note of the requests that came to a worker with this step."""

    def swapped(self, groups: Sequence[SequenceGroup]) -> None:
        """Take note of requests that are swapped out."""

    def tell_traced(self) -> None:
        """Traced requests may have come to a worker, been preempted, or lost it."""

    def publish(self, gained: Sequence[SequenceOutput]) -> None:
        """Bring what sequences gained to the front ends of their requests."""

    def fail(self, group: SequenceGroup) -> None:
        """End a request that the scheduler or the worker gave up on."""

    async def room(self) -> None:
        """Wait while front ends have too much to take."""

    def workers_changed(self) -> None:
        """A session began or ended, or a worker was drained or undrained."""

    def wake(self) -> None:
        """Have every worker look whether there is something to send."""

    def wake_for(self, output: SchedulerOutput) -> None:
        """Wake the workers that a step has left groups to."""


class WorkerLoop:
    """One worker: its connection and, while a session is open, its scheduler."""

    def __init__(self, fleet: Fleet, address: str) -> None:
        self.client = fleet.connect(address)
        self.scheduler: Scheduler | None = None
        self.epoch = 0
        self.num_steps = 0
        self.split = StepSplit()  # of all sessions
        self.step_tokens = Histogram(STEP_BOUNDS)  # of all sessions
        self.num_preemptions = 0  # of earlier sessions
        self.num_losses = 0  # sessions that ended otherwise than by being drained
        self.last_error = "not connected yet"
        self.instance_id = ""
        self.is_wanted = True
        """Whether to connect again when the session is over."""
        self._fleet = fleet
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._in_flight: deque[SchedulerOutput] = deque()  # steps that were sent and not answered
        self.fetcher: AdapterFetcher | None = None  # of the open session
        self.fetch_counts = FetchCounts()  # of all sessions
        self._most_in_flight = fleet.settings.max_in_flight_steps
        self.guesses = Guesses()  # of all sessions
        self._is_leaving = False  # the worker said so
        self._is_superseded = False
        self._is_lost_in_a_step = False
        self._undrained = asyncio.Event()
        self._undrained.set()
        self._drained_by = float("inf")  # when requests that are left after an operator's drain move elsewhere

    # ---- for operators and the membership

    @property
    def draining(self) -> bool:
        """Whether it is given no more requests, because it shuts down or an operator has drained it."""
        return self._is_leaving or not self._undrained.is_set()

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
        return WorkerStatus.SUPERSEDED if self._is_superseded else WorkerStatus.CONNECTING

    def wake(self) -> None:
        """Look again whether there is something to send. Nothing happens while no further step may be in flight."""
        if self._may_send:
            self._wake.set()

    @property
    def _may_send(self) -> bool:
        """Whether another step may be in flight."""
        return len(self._in_flight) < self._most_in_flight

    def drain(self) -> None:
        """Give the worker no more requests; after the grace period, move those that are left and close the session."""
        if self._undrained.is_set():
            log.info("worker drained by an operator", worker=self.client.address)
            self._undrained.clear()
            self._drained_by = time.monotonic() + self._fleet.settings.grace
            asyncio.get_running_loop().call_later(self._fleet.settings.grace, self._wake.set)
            self._admission_changed()

    def undrain(self) -> None:
        """Give the worker requests again."""
        if not self._undrained.is_set():
            log.info("worker undrained by an operator", worker=self.client.address)
            self._undrained.set()
            self._drained_by = float("inf")
            self._admission_changed()

    def leave(self) -> bool:
        """Do not connect again. Returns whether the loop is over, because no session is open."""
        self.is_wanted = False
        if self.scheduler is None and self._task is not None:
            self._task.cancel()
        return self.scheduler is None

    def _tell_leaving(self, is_leaving: bool) -> None:
        if is_leaving != self._is_leaving:
            log.info("worker is shutting down" if is_leaving else "worker serves again", worker=self.client.address)
            self._is_leaving = is_leaving
            self._admission_changed()

    def _admission_changed(self) -> None:
        if self.scheduler is not None and self.scheduler.admits == self.draining:
            self.scheduler.set_admission(not self.draining)
        self._wake.set()
        self._fleet.workers_changed()

    # ---- the loop

    async def run(self) -> None:
        """Connect, serve, and connect again after a pause that grows, for as long as it is wanted."""
        self._task = asyncio.current_task()
        pause = FIRST_RETRY_SECONDS
        while self.is_wanted:
            await self._undrained.wait()
            steps_before = self.num_steps
            self._is_lost_in_a_step = False
            level = logging.WARNING
            longest = max(LAST_RETRY_SECONDS, len(self._fleet.workers) / RETRIES_PER_SECOND)
            try:
                await self._serve()
            except WorkerError as error:
                reason = str(error)[:MOST_OF_A_REASON]  # part of it may be what the worker said
                self._is_superseded = isinstance(error, SupersededError)
                is_starting = isinstance(error, UnreachableError) and not self.epoch
                if is_starting or isinstance(error, DrainedError):
                    level = logging.INFO
                # Frames and failed tasks refer to each other, and to the session's scheduler and its requests.
                traceback.clear_frames(error.__traceback__)
            except Exception as error:  # whatever it is, the other workers and all streams go on
                log.error("worker loop failed", worker=self.client.address, exc_info=error)
                reason = "internal error; the server's log has the details"
                traceback.clear_frames(error.__traceback__)
            if self.num_steps > steps_before:
                pause = FIRST_RETRY_SECONDS
            elif self._is_lost_in_a_step and self._fleet.admits:
                # It was lost in a step and has answered none. Every further attempt would make suspects of the requests
                # that it is given, while other workers serve.
                pause, longest = max(pause, FIRST_FAILING_RETRY_SECONDS), LONG_RETRY_SECONDS
            if self._is_superseded:
                longest = LONG_RETRY_SECONDS
            if reason != self.last_error:
                log.log(level, "worker unavailable", worker=self.client.address, reason=reason)
            self.last_error = reason
            pause = min(pause, longest)
            if self.is_wanted:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, longest)

    async def _serve(self) -> None:
        try:
            info = await self.client.get_info()
            config = await self._fleet.accept(self.client, info)
            if not await self.client.is_serving(timeout=5):
                raise UnreachableError("the worker is not serving: it is starting or shutting down")
            self._check_is_available(info)
            self.client.epoch = _next_epoch(info)
            held_adapters = await self._fleet.adapters.check(self.client, info)
        except UnreachableError:
            await self.client.reconnect()
            raise
        self._check_is_available(info)
        self.instance_id = info.instance_id
        self.guesses.proposer = proposer_of(info.features)
        self.epoch = self.client.epoch
        self._is_superseded = False
        session = self.client.open_session(self.epoch, self.split)
        recorder = self._fleet.recorder
        try:
            scheduler = recorder.scheduler(config, self._fleet.waiting, self.client.address, session)
        except BaseException:
            session.close()
            raise
        self.scheduler = scheduler
        self.fetcher = fetcher = AdapterFetcher(
            self._fleet.adapters, self.client, scheduler, self._in_flight, self.fetch_counts
        )
        fetcher.begin(held_adapters)
        self._fleet.serving[scheduler] = self
        log.info("worker connected", worker=self.client.address, epoch=self.epoch, blocks=info.num_device_blocks)
        settings = self._fleet.settings
        if settings.prefix_caching and config.sliding_window:
            log.warning(
                "this model's prompts share no prefixes: each of its layers lets go of the blocks behind its window",
                worker=self.client.address,
                sliding_window=config.sliding_window,
            )
        self._in_flight.clear()
        end: Exception | None = None  # None if this scheduler itself ends it
        try:
            self._admission_changed()
            await _until_one_fails(
                self._send_steps(scheduler, session, fetcher),
                self._receive_answers(scheduler, session, fetcher, info.vocabulary_size),
                watch_health(self.client, lambda: self.num_steps, settings.health_interval),
                watch_steps(session, step_timeout(settings, config)),
                watch_leaving(self.client, self._tell_leaving),
                fetcher.run(),
            )
        except Exception as error:
            end = error
            raise
        finally:
            self._end(scheduler, session, end)
            await self.client.reconnect()

    def _check_is_available(self, info: WorkerInfo) -> None:
        """Raises WorkerError when the worker is in a session that is not to be ended.

        A scheduler that has just started takes a worker over from another scheduler: that one is its predecessor, or a
        configuration mistake, which then shows. The other scheduler does not take the worker back: otherwise the two
        would take turns for ever, and every request's tokens would be computed again and again.
        """
        for other in self._fleet.workers:
            if other.scheduler is not None and info.instance_id and other.instance_id == info.instance_id:
                raise WorkerError(f"it is the worker that is connected as {other.client.address}")
        if info.in_session and 0 < self.epoch < info.epoch:
            raise SupersededError(
                f"another scheduler has taken the worker, with epoch {info.epoch} after {self.epoch} of this one; "
                "this one waits until that session ends"
            )

    def _end(self, scheduler: Scheduler, session: Session, reason: Exception | None) -> None:
        """The session is over, for whatever reason: the requests that ran there go on elsewhere."""
        # A worker that was leaving is not lost, however its session ended: a step on its way may break the stream.
        is_lost = reason is not None and not self._is_leaving and not isinstance(reason, DrainedError)
        # An error of this scheduler's own says nothing of the requests that the worker had.
        blames_requests = is_lost and isinstance(reason, WorkerError) and reason.blames_requests
        self._is_lost_in_a_step = is_lost and bool(self._in_flight)
        self.num_losses += is_lost
        self._is_leaving = False
        self.scheduler = None
        del self._fleet.serving[scheduler]
        self._in_flight.clear()
        self.fetcher = None
        session.close()
        try:
            for group in scheduler.release_all(time.monotonic(), blames=blames_requests):
                self._fleet.fail(group)
            self._fleet.tell_traced()
            self.num_preemptions += sum(scheduler.num_preemptions.values())
        finally:
            self._fleet.workers_changed()

    async def _send_steps(self, scheduler: Scheduler, session: Session, fetcher: AdapterFetcher) -> None:
        num_swaps = 0
        while True:
            self._wake.clear()
            ask_again_at: float | None = None
            if self._may_send:
                began = perf_counter_ns()
                output = scheduler.schedule(time.monotonic())
                self.split.schedule += perf_counter_ns() - began
                for group in output.ignored:
                    self._fleet.fail(group)
                if output.preempted:
                    self._fleet.wake()  # another worker may have room for them
                if scheduler.num_preemptions[PreemptionMode.SWAP] != num_swaps:
                    num_swaps = scheduler.num_preemptions[PreemptionMode.SWAP]
                    self._fleet.swapped(list(scheduler.swapped))
                self._fleet.wake_for(output)
                fetcher.lack(output.lacking_loras)
                ask_again_at = output.ask_again_at
                if not output.is_empty:
                    self._in_flight.append(output)
                    if output.new_sequences:
                        self._fleet.admitted(output)
                    self._fleet.tell_traced()
                    await session.send(output)
                    continue
            if not scheduler.admits:
                self._check_drained(scheduler)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ask_again_at and max(0.0, ask_again_at - time.monotonic())):
                    await self._wake.wait()

    def _check_drained(self, scheduler: Scheduler) -> None:
        """Raises DrainedError when an operator has drained the worker and it has no requests left, or no time."""
        if self._undrained.is_set():
            return
        if not (self._in_flight or scheduler.running or scheduler.swapped):
            raise DrainedError("drained by an operator")
        if time.monotonic() >= self._drained_by:
            raise DrainedError("drained by an operator; its remaining requests go on elsewhere")

    async def _receive_answers(
        self, scheduler: Scheduler, session: Session, fetcher: AdapterFetcher, vocabulary_size: int
    ) -> None:
        while True:
            answer = await session.receive()
            output = self._in_flight[0]
            began = perf_counter_ns()
            try:
                check_answer(output, answer, vocabulary_size)
                gained = scheduler.update_from_output(output, answer, time.monotonic())
                self.guesses.take(answer)
            except ValueError as error:
                raise WorkerError(str(error)) from error
            self._in_flight.popleft()
            fetcher.step_answered()
            self.num_steps += 1
            if output.num_tokens:
                self.step_tokens.observe(output.num_tokens)
            updated = perf_counter_ns()
            self.split.update += updated - began
            self._fleet.publish(gained)
            self.split.publish += perf_counter_ns() - updated
            if self._fleet.settings.check_invariants:
                scheduler.blocks.check()
            self._wake.set()
            await self._fleet.room()


def _next_epoch(info: WorkerInfo) -> int:
    try:
        return next_epoch(info.epoch, time.time_ns())
    except ValueError as error:
        raise WorkerError(f"{error}: restart the worker") from None


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
