"""WorkerService over gRPC: readiness, fencing between sessions, and the order of steps within one.

The event loop only moves messages; decoding, computing and encoding of a step happen on the device thread. The newest
session owns the worker: from the moment one begins, no step of an older one is started.
"""

import asyncio
import contextlib
import secrets
import traceback
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from opentelemetry.trace import Tracer
from prometheus_client.core import Metric

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
from worker_service.errors import DeviceLostError, FencingError, InvalidStepError, is_out_of_memory
from worker_service.loading.tokenizer_files import read_pieces
from worker_service.serving.adapter_calls import AdapterCalls
from worker_service.serving.adapters import drop_adapter, load_adapter
from worker_service.serving.codec import decode_scheduler_output, encode_worker_info
from worker_service.serving.compute import Computation, plan
from worker_service.serving.device_thread import DeviceThread, Later
from worker_service.serving.metrics import WorkerStatistics, families
from worker_service.serving.traces import Stays
from worker_service.session.session import Session

if TYPE_CHECKING:
    # These import torch, which the server does after its port is bound.
    from worker_service.execution.steps.model_runner import RunningStep
    from worker_service.execution.worker import Worker

log = structlog.get_logger()

Context = grpc.aio.ServicerContext[Any, Any]

_STEPS_IN_HAND = 2
"""Steps of a session that are read and not yet answered: the one being computed, and one so that the next can follow it
without waiting for a message."""


@dataclass(eq=False)
class _Stream:
    """One open session."""

    session: Session
    answers: "asyncio.Queue[asyncio.Future[ModelOutput] | None]" = field(default_factory=asyncio.Queue)
    """Answers in the order of the steps; None after the last."""
    awaited: "asyncio.Future[ModelOutput] | None" = None
    """The answer that the call is waiting for."""
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_STEPS_IN_HAND))
    last: "tuple[RunningStep, Later[ModelOutput]] | None" = None
    """The step that was launched last, if the worker runs ahead. Only the device thread uses it."""
    stays: Stays | None = None
    """Spans of its sequences, if there are any. Only the event loop uses it."""
    end: RequestError | None = None
    """Why no further step of the session may be started. Set on either thread."""


_FAILURES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
_SHUTTING_DOWN = RequestError(grpc.StatusCode.ABORTED, "the worker is shutting down")


class WorkerServicer(worker_service_pb2_grpc.WorkerServiceServicer):
    """Serves one session at a time. Create it inside the running event loop; UNAVAILABLE until `set_ready`.

    `device_lost` is set when no step can be computed in this process any more.
    """

    def __init__(self, device_thread: DeviceThread, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self.device_lost = asyncio.Event()
        self._statistics = WorkerStatistics()
        self._instance_id = secrets.token_hex(16)
        self._device_thread = device_thread
        self._worker: Worker | None = None
        self._stream: _Stream | None = None
        self._newest_epoch = 0
        self._draining = asyncio.Event()
        self._adapter_calls = AdapterCalls(lambda: self._newest_epoch)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_session(self) -> bool:
        """Whether a scheduler has a session."""
        return self._stream is not None

    def set_ready(self, worker: "Worker") -> None:
        """Have sessions opened from now on."""
        self._worker = worker

    async def drain(self, grace: float) -> None:
        """Open no more sessions; end the open one when no sequence lives in it, or after `grace` seconds."""
        self._draining.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._idle.wait()
        if self._stream is not None:
            self._close(self._stream, _SHUTTING_DOWN)

    async def metrics(self) -> Iterator[Metric]:
        """The metrics of this moment."""
        limits = self._worker.limits if self._worker is not None else None
        return families(
            self._statistics,
            num_sequences=len(self._stream.session.sequences) if self._stream is not None else 0,
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
        # One at a time is in memory twice, and under way to other ranks.
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
        stream = self._begin(worker, first)
        reader = asyncio.create_task(self._read(worker, stream, first, steps))
        try:
            while (answer := await stream.answers.get()) is not None:
                stream.awaited = answer
                yield await answer
                stream.room.release()
                if not stream.session.sequences and stream.answers.empty():
                    self._idle.set()
            await reader
        finally:
            self._end(stream)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            while not stream.answers.empty():
                unanswered = stream.answers.get_nowait()
                if unanswered is not None and not unanswered.cancel():
                    unanswered.exception()  # otherwise asyncio logs that the error was never retrieved

    def _ready_worker(self) -> "Worker":
        if self._worker is None:
            raise RequestError(grpc.StatusCode.UNAVAILABLE, "the worker is still loading its model")
        return self._worker

    async def _first(self, steps: AsyncIterator[SchedulerOutput]) -> SchedulerOutput | None:
        """The step that a session begins with; None when the scheduler leaves without one. ABORTED by a drain."""
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

    def _begin(self, worker: "Worker", first: SchedulerOutput) -> _Stream:
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
        if self._stream is not None:
            self._close(
                self._stream,
                RequestError(grpc.StatusCode.FAILED_PRECONDITION, f"superseded by epoch {self._newest_epoch}"),
            )
        stays = Stays(self._tracer) if self._tracer is not None else None
        self._stream = _Stream(Session(first.epoch, worker.limits), stays=stays)
        self._statistics.num_sessions += 1
        log.info("session began", epoch=first.epoch)
        return self._stream

    def _close(self, stream: _Stream, reason: RequestError) -> None:
        stream.end = reason
        # Wakes the call wherever it waits: for the device, or for its next step.
        if stream.awaited is not None and not stream.awaited.done():
            stream.awaited.set_exception(reason)
        else:
            failed: asyncio.Future[ModelOutput] = asyncio.get_running_loop().create_future()
            failed.set_exception(reason)
            stream.answers.put_nowait(failed)

    def _end(self, stream: _Stream) -> None:
        if stream.end is None:
            stream.end = RequestError(grpc.StatusCode.CANCELLED, "closed by the scheduler")
        self._statistics.num_failures += stream.end.code in _FAILURES
        if stream.stays is not None:
            stream.stays.close()
            stream.stays = None
        log.info("session ended", epoch=stream.session.epoch, reason=str(stream.end))
        if self._stream is stream:
            self._stream = None
            self._idle.set()

    async def _read(
        self, worker: "Worker", stream: _Stream, first: SchedulerOutput, steps: AsyncIterator[SchedulerOutput]
    ) -> None:
        """Hand steps to the device thread as they come; it computes them one after the other."""
        try:
            step: SchedulerOutput | None = first
            while step is not None:
                await stream.room.acquire()
                self._idle.clear()
                stream.answers.put_nowait(self._submit(worker, stream, step))
                step = await anext(steps, None)
        finally:
            stream.answers.put_nowait(None)

    def _submit(self, worker: "Worker", stream: _Stream, step: SchedulerOutput) -> "asyncio.Future[ModelOutput]":
        """Compute a step on the device thread. Unlike a wrapped future, this one may be failed before it is done."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[ModelOutput] = loop.create_future()
        computed = self._device_thread.submit(partial(_compute, worker, stream, step))

        def settle(done: "Future[ModelOutput]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has ended
                loop.call_soon_threadsafe(self._settle, stream, step, answer, done)

        computed.add_done_callback(settle)
        return answer

    def _settle(
        self,
        stream: _Stream,
        step: SchedulerOutput,
        answer: "asyncio.Future[ModelOutput]",
        computed: "Future[ModelOutput]",
    ) -> None:
        error = computed.exception()
        if error is None:
            self._statistics.count(step, computed.result())
            if stream.stays is not None:
                stream.stays.computed(step, computed.result())
        if isinstance(error, DeviceLostError):
            self.device_lost.set()
            error = RequestError(grpc.StatusCode.INTERNAL, "the worker's device failed in a step")
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(computed.result())


def _compute(worker: "Worker", stream: _Stream, message: SchedulerOutput) -> ModelOutput | Later[ModelOutput]:
    """Compute one step, on the device thread. After an error the session is over, whatever was sent ahead.

    Where the worker runs ahead, the step is on its way when this returns, and the next one may follow it.
    """
    with _failures_end(worker, stream):
        output = decode_scheduler_output(message, worker.limits)
        before = stream.last
        if before is not None and (before[1].is_settled or not stream.session.follows_unseen(output)):
            before[1].settle()
            before = None
    with _failures_end(worker, stream):
        planned = plan(worker, stream.session, output)
        if before is not None and not worker.runner.follow(planned.chunks):
            before[1].settle()
            before = None
        if worker.ranks.size > 1:  # a rank that got the step waits for its sums: no other work may come between
            drafts = [chunk.drafts for chunk in planned.chunks]
            worker.ranks.send(stream.session.epoch, message.SerializeToString(), drafts)
        computation = Computation.launch(worker, stream.session, planned, before and before[0])
        if not worker.runner.runs_ahead or worker.ranks.size > 1:  # ranks finish a step before they take another
            return computation.finish()
        later = Later(computation.step.is_done, partial(_finish, computation, stream))
        stream.last = computation.step, later
    return later


def _finish(computation: Computation, stream: _Stream) -> ModelOutput:
    with _failures_end(computation.worker, stream):
        return computation.finish()


@contextlib.contextmanager
def _failures_end(worker: "Worker", stream: _Stream) -> Iterator[None]:
    """Around a session's work on the device thread: it does nothing once the session has ended, and errors end it."""
    if stream.end is not None:
        raise stream.end
    try:
        yield
        return
    except Exception as error:
        stream.end = _explain(error)
        traceback.clear_frames(error.__traceback__)  # the step's tensors
    worker.runner.recover()
    raise stream.end


def _explain(error: Exception) -> RequestError:
    if isinstance(error, InvalidStepError):
        return RequestError(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    if isinstance(error, FencingError):
        return RequestError(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    if is_out_of_memory(error):
        log.error("out of memory in a step", exc_info=error)
        return RequestError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "the worker ran out of memory in this step; start it with a lower --max-num-batched-tokens",
        )
    log.error("a step failed", exc_info=error)
    return RequestError(grpc.StatusCode.INTERNAL, "a step failed; the worker's log has the details")
