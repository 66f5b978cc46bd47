"""One open session: its answers on the event loop, and its steps on the device thread. The first error ends the
session.
"""

import asyncio
import contextlib
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

import grpc
import structlog

from pagewire.v1.scheduler_output_pb2 import ModelOutput, SchedulerOutput
from pagewire_common.calls.errors import RequestError
from worker_service.errors import FencingError, InvalidStepError, is_out_of_memory
from worker_service.serving.codec import decode_scheduler_output
from worker_service.serving.step_in_flight import StepInFlight
from worker_service.serving.traces import Stays
from worker_service.session.session import Session

if TYPE_CHECKING:
    # This import loads torch, which must happen after the server has bound its port.
    from worker_service.execution.worker import Worker

log = structlog.get_logger()

_STEPS_IN_HAND = 2
"""Maximum number of a session's steps that are read and not yet answered. The second step can start without waiting for
a message when the first step ends.
"""
_FAILURES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)


class OpenSession:
    """An open session. Only the device thread calls `compute`. Both threads set `end`. The event loop uses all other
    attributes.
    """

    def __init__(self, worker: "Worker", epoch: int, stays: Stays | None = None) -> None:
        """Open a session.

        stays: the trace spans of its sequences, if tracing is on.
        """
        self.session = Session(epoch, worker.limits)
        self.answers: asyncio.Queue[asyncio.Future[ModelOutput] | None] = asyncio.Queue()
        """Answers in the order of the steps, then None after the last answer."""
        self.awaited: asyncio.Future[ModelOutput] | None = None
        """The answer that the gRPC call is waiting for."""
        self.room = asyncio.Semaphore(_STEPS_IN_HAND)
        self.stays = stays
        self.end: RequestError | None = None
        """The reason why no further step may start, or None while the session is open."""
        self._worker = worker
        # The last launched step, if the worker runs ahead.
        self._last: StepInFlight | None = None

    @property
    def has_failed(self) -> bool:
        """Whether an error in a step has ended the session."""
        return self.end is not None and self.end.code in _FAILURES

    def close(self, reason: RequestError) -> None:
        """Start no further step, and fail the next answer."""
        self.end = reason
        # The error wakes the gRPC call, whether it waits for the device or for its next step.
        if self.awaited is not None and not self.awaited.done():
            self.awaited.set_exception(reason)
        else:
            failed: asyncio.Future[ModelOutput] = asyncio.get_running_loop().create_future()
            failed.set_exception(reason)
            self.answers.put_nowait(failed)

    def compute(self, message: SchedulerOutput) -> ModelOutput | StepInFlight:
        """Compute one step. An error ends the session, including the steps that were sent ahead.

        If the worker runs ahead, `compute` returns when the step is launched, and the next step may follow.
        """
        worker, ranks = self._worker, self._worker.ranks
        with self._failures_end():
            output = decode_scheduler_output(message, worker.limits)
            before = self._last
            if before is not None and (before.is_settled or not self.session.follows_unseen(output)):
                before.settle()
                before = None
        with self._failures_end():
            step = StepInFlight.begin(worker, self.session, output, self._failures_end)
            if before is not None and not worker.runner.follow(step.chunks):
                before.settle()
                before = None
            # In a step, every rank waits for sums of all ranks. No other work may therefore run between sending and
            # launching the step.
            if ranks.size > 1:
                ranks.send(self.session.epoch, message.SerializeToString(), [chunk.drafts for chunk in step.chunks])
            step.launch(before)
            # With several ranks, the ranks finish each step before they receive the next step.
            if not worker.runner.runs_ahead or ranks.size > 1:
                return step.answer()
            self._last = step
        return step

    @contextlib.contextmanager
    def _failures_end(self) -> Iterator[None]:
        """A context for work on the device thread. If the session has ended, the work is skipped. An error in the work
        ends the session.
        """
        if self.end is not None:
            raise self.end
        try:
            yield
            return
        except Exception as error:
            self.end = _explain(error)
            traceback.clear_frames(error.__traceback__)  # frees the step's tensors
        self._worker.runner.recover()
        raise self.end


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
