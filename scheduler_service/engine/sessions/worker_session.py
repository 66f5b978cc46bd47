"""One session with a worker.

One task sends steps ahead of their answers, so the worker always has a next step; others process answers and watch the
worker. The first failing task ends the session.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
from time import perf_counter_ns
from typing import Any

from scheduler_service.core import PreemptionMode, Scheduler
from scheduler_service.engine.sessions.answer_check import check_answer
from scheduler_service.engine.sessions.worker_fleet import WorkerFleet
from scheduler_service.engine.worker_link.client import watch_health, watch_leaving
from scheduler_service.engine.worker_link.errors import DrainedError, WorkerError
from scheduler_service.engine.worker_link.limits import step_timeout
from scheduler_service.engine.worker_link.session import Session, watch_steps
from scheduler_service.engine.workers import Worker
from scheduler_service.wire.codec import WorkerInfo


class WorkerSession:
    """One session, until `end`. `held`: adapters on the worker before the session."""

    def __init__(
        self, fleet: WorkerFleet, worker: Worker, stream: Session, scheduler: Scheduler, held: Sequence[str]
    ) -> None:
        self._fleet = fleet
        self._worker = worker
        self._stream = stream
        self._scheduler = scheduler
        worker.in_flight.clear()
        worker.scheduler = scheduler
        self._fetcher = fleet.adapters.begin(worker, scheduler, held)
        fleet.workers.serving[scheduler] = worker

    async def run(self, info: WorkerInfo) -> None:
        fleet, worker, settings = self._fleet, self._worker, self._fleet.settings
        fleet.admission_changed(worker)
        await _until_one_fails(
            self._send_steps(),
            self._receive_answers(info.vocabulary_size),
            watch_health(worker.client, lambda: worker.num_steps, settings.health_interval),
            watch_steps(self._stream, step_timeout(settings, self._scheduler.config)),
            watch_leaving(worker.client, lambda is_leaving: fleet.tell_leaving(worker, is_leaving)),
            self._fetcher.run(),
        )

    def end(self, reason: Exception | None) -> bool:
        """`reason` is None if this scheduler ends the session. Returns whether the worker was lost during a step."""
        fleet, worker, scheduler = self._fleet, self._worker, self._scheduler
        # A shutdown is no loss, even if it breaks the stream during a step.
        is_lost = reason is not None and not worker.is_leaving and not isinstance(reason, DrainedError)
        # The scheduler's own failure makes no request a suspect.
        blames_requests = is_lost and isinstance(reason, WorkerError) and reason.blames_requests
        is_lost_in_a_step = is_lost and bool(worker.in_flight)
        worker.num_losses += is_lost
        worker.is_leaving = False
        worker.scheduler = None
        del fleet.workers.serving[scheduler]
        worker.in_flight.clear()
        fleet.adapters.end(self._fetcher)
        self._stream.close()
        try:
            for group in scheduler.release_all(time.monotonic(), blames=blames_requests):
                fleet.requests.fail(group)
            fleet.requests.tell_traced()
            worker.num_preemptions += sum(scheduler.num_preemptions.values())
            worker.past_encoder_counts += scheduler.encoder_cache.counts
        finally:
            fleet.note_change()
        return is_lost_in_a_step

    async def _send_steps(self) -> None:
        worker, scheduler, requests, workers = self._worker, self._scheduler, self._fleet.requests, self._fleet.workers
        num_swaps = 0
        while True:
            worker.woken.clear()
            ask_again_at: float | None = None
            if worker.may_send:
                began = perf_counter_ns()
                output = scheduler.schedule(time.monotonic())
                worker.split.schedule += perf_counter_ns() - began
                for group in output.ignored:
                    requests.fail(group)
                if output.preempted:
                    workers.wake()  # another worker may have room
                if scheduler.num_preemptions[PreemptionMode.SWAP] != num_swaps:
                    num_swaps = scheduler.num_preemptions[PreemptionMode.SWAP]
                    requests.swapped(list(scheduler.swapped))
                workers.wake_for(output)
                if output.lacking_adapters or self._fetcher.lacking:
                    self._fetcher.lack(output.lacking_adapters)
                ask_again_at = output.ask_again_at
                if not output.is_empty:
                    worker.in_flight.append(output)
                    if output.new_sequences:
                        requests.admitted(output)
                    requests.tell_traced()
                    await self._stream.send(output)
                    continue
            if not scheduler.admits:
                self._check_drained()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ask_again_at and max(0.0, ask_again_at - time.monotonic())):
                    await worker.woken.wait()

    def _check_drained(self) -> None:
        """Raise DrainedError if the worker was drained and has no requests left, or its grace period is over."""
        if self._worker.undrained.is_set():
            return
        if not (self._worker.in_flight or self._scheduler.running or self._scheduler.swapped):
            raise DrainedError("drained by an operator")
        if time.monotonic() >= self._worker.drained_by:
            raise DrainedError("drained by an operator; its remaining requests go on elsewhere")

    async def _receive_answers(self, vocabulary_size: int) -> None:
        worker, scheduler, requests = self._worker, self._scheduler, self._fleet.requests
        while True:
            answer = await self._stream.receive()
            output = worker.in_flight[0]
            began = perf_counter_ns()
            try:
                check_answer(output, answer, vocabulary_size)
                gained = scheduler.update_from_output(output, answer, time.monotonic())
                worker.drafts.take(answer)
            except ValueError as error:
                raise WorkerError(str(error)) from error
            worker.in_flight.popleft()
            worker.answered.set()
            worker.num_steps += 1
            if output.num_tokens:
                worker.step_tokens.observe(output.num_tokens)
            updated = perf_counter_ns()
            worker.split.update += updated - began
            requests.publish(gained)
            worker.split.publish += perf_counter_ns() - updated
            if self._fleet.settings.check_invariants:
                scheduler.blocks.check()
                scheduler.encoder_cache.check()
            worker.woken.set()
            await requests.room()


async def _until_one_fails(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Raises the first error after all coroutines have stopped."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        failed, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in failed:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
