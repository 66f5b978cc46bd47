"""Serves WorkerService: refuses calls until the model is loaded, and keeps the order of steps in a session.

The event loop only receives and sends messages; the device thread decodes, computes and encodes. After a new session
has begun, no step of an older session starts."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from opentelemetry.trace import Tracer
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagewire.v1 import worker_service_pb2_grpc
from pagewire.v1.scheduler_output_pb2 import ModelOutput, SchedulerOutput
from pagewire.v1.worker_service_pb2 import (
    DropAdapterRequest,
    DropAdapterResponse,
    GetTokenizerRequest,
    GetTokenizerResponse,
    GetWorkerInfoRequest,
    GetWorkerInfoResponse,
    TakeAdapterRequest,
    TakeAdapterResponse,
)
from pagewire_common.calls.errors import RequestError
from pagewire_common.epochs import check_epoch
from worker_service.errors import DeviceLostError
from worker_service.loading.tokenizer_files import read_pieces
from worker_service.serving.adapter_calls import AdapterCalls
from worker_service.serving.adapters import drop_adapter, load_adapter
from worker_service.serving.codec.answers import encode_worker_info
from worker_service.serving.device_thread import DeviceThread
from worker_service.serving.open_session import OpenSession
from worker_service.serving.traces import Stays

if TYPE_CHECKING:
    # This import loads torch, before which the server must have bound its port.
    from worker_service.execution.worker import Worker

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]

_SHUTTING_DOWN = RequestError(grpc.StatusCode.ABORTED, "the worker is shutting down")


@dataclass(slots=True)
class WorkerStatistics:
    """Numbers and microseconds of a worker's work since its start."""

    num_sessions: int = 0
    num_steps: int = 0
    num_failures: int = 0
    num_tokens: int = 0
    num_sampled_tokens: int = 0
    move_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    guess_us: int = 0
    encode_us: int = 0

    def count(self, step: SchedulerOutput, answer: ModelOutput) -> None:
        self.num_steps += 1
        self.num_tokens += sum(step.num_scheduled_tokens) or len(step.sequence_ids)
        self.num_tokens += sum(answer.num_draft_tokens) - sum(step.num_draft_tokens)
        self.num_sampled_tokens += len(answer.token_ids)
        self.move_us += answer.timing.move_us
        self.forward_us += answer.timing.forward_us
        self.sample_us += answer.timing.sample_us
        self.guess_us += answer.timing.guess_us
        self.encode_us += answer.timing.encode_us


def families(
    statistics: WorkerStatistics, *, num_sequences: int, num_device_blocks: int, num_host_blocks: int, draining: bool
) -> Iterator[Metric]:
    """num_sequences: of the open session. num_device_blocks, num_host_blocks: 0 until the model is loaded."""
    for name, text, value in (
        ("sequences", "Sequences that live in the open session.", num_sequences),
        ("device_blocks", "Blocks in device memory; 0 until the model is loaded.", num_device_blocks),
        ("host_blocks", "Blocks in host memory, for swapping.", num_host_blocks),
        ("draining", "1 while the worker is shutting down.", draining),
    ):
        yield GaugeMetricFamily(f"pagewire_worker_{name}", text, value)
    for name, text, value in (
        ("sessions", "Sessions that schedulers opened.", statistics.num_sessions),
        ("steps", "Steps computed.", statistics.num_steps),
        ("failures", "Sessions that ended because a step failed.", statistics.num_failures),
        ("tokens", "Tokens whose keys and values were computed.", statistics.num_tokens),
        ("sampled_tokens", "Tokens sampled.", statistics.num_sampled_tokens),
    ):
        yield CounterMetricFamily(f"pagewire_worker_{name}", text, value)
    phases = CounterMetricFamily("pagewire_worker_step_phase_seconds", "Where steps' time went.", labels=["phase"])
    for phase in ("move", "forward", "sample", "guess", "encode"):
        phases.add_metric([phase], getattr(statistics, f"{phase}_us") / 1e6)
    yield phases


class WorkerServicer(worker_service_pb2_grpc.WorkerServiceServicer):
    """Serves one session at a time. Must be created while the event loop runs. Until `set_ready`, all RPCs fail with
    UNAVAILABLE. `device_lost` is set when this process can no longer use the GPU."""

    def __init__(self, device_thread: DeviceThread, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self.device_lost = asyncio.Event()
        self._statistics = WorkerStatistics()
        self._instance_id = secrets.token_hex(16)
        self._device_thread = device_thread
        self._worker: Worker | None = None
        self._open: OpenSession | None = None
        self._newest_epoch = 0
        self._draining = asyncio.Event()
        self._adapter_calls = AdapterCalls(lambda: self._newest_epoch)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_session(self) -> bool:
        return self._open is not None

    def set_ready(self, worker: "Worker") -> None:
        self._worker = worker

    async def drain(self, grace: float) -> None:
        """Accept no further sessions. End the open session when no sequence lives, at the latest after `grace`
        seconds."""
        self._draining.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._idle.wait()
        if self._open is not None:
            self._open.close(_SHUTTING_DOWN)

    async def metrics(self) -> Iterator[Metric]:
        limits = self._worker.limits if self._worker is not None else None
        return families(
            self._statistics,
            num_sequences=len(self._open.session.sequences) if self._open is not None else 0,
            num_device_blocks=limits.num_device_blocks if limits is not None else 0,
            num_host_blocks=limits.num_host_blocks if limits is not None else 0,
            draining=self._draining.is_set(),
        )

    async def GetWorkerInfo(self, request: GetWorkerInfoRequest, context: Context) -> GetWorkerInfoResponse:
        worker = self._ready_worker()
        return encode_worker_info(
            worker.info,
            worker.limits,
            self._newest_epoch,
            in_session=self.in_session,
            instance_id=self._instance_id,
            adapters=worker.adapters.fingerprints,
        )

    async def GetTokenizer(self, request: GetTokenizerRequest, context: Context) -> AsyncIterator[GetTokenizerResponse]:
        for name, data in read_pieces(self._ready_worker().tokenizer_files):
            yield GetTokenizerResponse(name=name, data=data)

    async def TakeAdapter(
        self, request_iterator: AsyncIterator[TakeAdapterRequest], context: Context
    ) -> TakeAdapterResponse:
        worker = self._ready_worker()
        # Loading needs memory for a whole adapter. Pieces of two adapters sent to other ranks must not be mixed.
        await self._adapter_calls.take(
            aiter(request_iterator), lambda pieces: load_adapter(worker, self._device_thread, pieces)
        )
        return TakeAdapterResponse()

    async def DropAdapter(self, request: DropAdapterRequest, context: Context) -> DropAdapterResponse:
        worker = self._ready_worker()
        self._adapter_calls.check(request.epoch)
        drop_adapter(worker, self._device_thread, request.fingerprint)
        return DropAdapterResponse()

    async def Execute(
        self, request_iterator: AsyncIterator[SchedulerOutput], context: Context
    ) -> AsyncIterator[ModelOutput]:
        worker = self._ready_worker()
        steps = aiter(request_iterator)
        first = await self._first(steps)
        if first is None:
            return
        opened = self._begin(worker, first)
        reader = asyncio.create_task(self._read(opened, first, steps))
        try:
            while (answer := await opened.answers.get()) is not None:
                opened.awaited = answer
                yield await answer
                opened.room.release()
                if not opened.session.sequences and opened.answers.empty():
                    self._idle.set()
            await reader
        finally:
            self._end(opened)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            while not opened.answers.empty():
                unanswered = opened.answers.get_nowait()
                if unanswered is not None and not unanswered.cancel():
                    unanswered.exception()  # so that asyncio does not log the error

    @property
    def is_encoding(self) -> bool:
        """Whether the background thread of the worker encodes an image."""
        return self._worker is not None and (images := self._worker.runner.images) is not None and images.is_busy

    def _ready_worker(self) -> "Worker":
        if self._worker is None:
            raise RequestError(grpc.StatusCode.UNAVAILABLE, "the worker is still loading its model")
        return self._worker

    async def _first(self, steps: AsyncIterator[SchedulerOutput]) -> SchedulerOutput | None:
        """The first step of a session, or None if the call ends without one. Raises RequestError with status ABORTED
        while the worker drains."""
        step = asyncio.ensure_future(anext(steps, None))
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait((step, draining), return_when=asyncio.FIRST_COMPLETED)
            if self._draining.is_set():
                raise _SHUTTING_DOWN
            return step.result()
        finally:
            step.cancel()
            draining.cancel()
            await asyncio.gather(step, draining, return_exceptions=True)

    def _begin(self, worker: "Worker", first: SchedulerOutput) -> OpenSession:
        if self.device_lost.is_set():
            raise RequestError(grpc.StatusCode.UNAVAILABLE, "the worker's device failed")
        try:
            check_epoch(first.epoch, self._newest_epoch)
        except ValueError as error:
            raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None
        if first.step_id != 1:
            raise RequestError(
                grpc.StatusCode.FAILED_PRECONDITION, f"a session begins with step_id 1, not {first.step_id}"
            )
        self._newest_epoch = first.epoch
        self._adapter_calls.end_older()
        if self._open is not None:
            self._open.close(
                RequestError(grpc.StatusCode.FAILED_PRECONDITION, f"superseded by epoch {self._newest_epoch}")
            )
        stays = Stays(self._tracer) if self._tracer is not None else None
        self._open = OpenSession(worker, first.epoch, stays)
        self._statistics.num_sessions += 1
        log.info("session began", epoch=first.epoch)
        return self._open

    def _end(self, opened: OpenSession) -> None:
        if opened.end is None:
            opened.end = RequestError(grpc.StatusCode.CANCELLED, "closed by the scheduler")
        if opened.has_failed:
            self._statistics.num_failures += 1
        if opened.stays is not None:
            opened.stays.close()
            opened.stays = None
        log.info("session ended", epoch=opened.session.epoch, reason=str(opened.end))
        if self._open is opened:
            self._open = None
            self._idle.set()

    async def _read(self, opened: OpenSession, first: SchedulerOutput, steps: AsyncIterator[SchedulerOutput]) -> None:
        """Submit the steps of a session to the device thread, which computes them in order."""
        try:
            step: SchedulerOutput | None = first
            while step is not None:
                await opened.room.acquire()
                self._idle.clear()
                opened.answers.put_nowait(self._submit(opened, step))
                step = await anext(steps, None)
        finally:
            opened.answers.put_nowait(None)

    def _submit(self, opened: OpenSession, step: SchedulerOutput) -> "asyncio.Future[ModelOutput]":
        """Returns a future for the answer. Unlike with `asyncio.wrap_future`, an error can be set before the step is
        computed."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[ModelOutput] = loop.create_future()
        opened.prepare(step)
        computed = self._device_thread.submit(partial(opened.compute, step))

        def settle(done: "Future[ModelOutput]") -> None:
            with contextlib.suppress(RuntimeError):  # the event loop may already be closed
                loop.call_soon_threadsafe(self._settle, opened, step, answer, done)

        computed.add_done_callback(settle)
        return answer

    def _settle(
        self,
        opened: OpenSession,
        step: SchedulerOutput,
        answer: "asyncio.Future[ModelOutput]",
        computed: "Future[ModelOutput]",
    ) -> None:
        error = computed.exception()
        if error is None:
            self._statistics.count(step, computed.result())
            if opened.stays is not None:
                opened.stays.computed(step, computed.result())
        if isinstance(error, DeviceLostError):
            self.device_lost.set()
            error = RequestError(grpc.StatusCode.INTERNAL, "the worker's device failed in a step")
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(computed.result())
