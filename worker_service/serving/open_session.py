"""An open session. The device thread computes its steps, and the event loop sends the answers to the scheduler. The
first error ends the session.
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
    # This import loads torch. At run time, torch must not be loaded before the server has bound its port.
    from worker_service.execution.worker import Worker

log = structlog.get_logger()

_STEPS_IN_HAND = 2
"""Maximum number of steps of a session that the worker has received and not yet answered. When the first step ends, the
second step can start without waiting for a message from the scheduler.
"""
_FAILURES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)


class OpenSession:
    """An open session. Only the device thread calls `compute`. Both the device thread and the event loop set `end`.
    Only the event loop uses the other public attributes.
    """

    def __init__(self, worker: "Worker", epoch: int, stays: Stays | None = None) -> None:
        """Create a session without sequences.

        stays: the trace spans of the session's sequences, if tracing is on.
        """
        self.session = Session(epoch, worker.limits)
        self.answers: asyncio.Queue[asyncio.Future[ModelOutput] | None] = asyncio.Queue()
        """The answers to the session's steps, in the order of the steps. None follows after the last answer."""
        self.awaited: asyncio.Future[ModelOutput] | None = None
        """The answer for which the gRPC call of the session is waiting."""
        self.room = asyncio.Semaphore(_STEPS_IN_HAND)
        self.stays = stays
        self.end: RequestError | None = None
        """The reason why no further step may start, or None while the session is open."""
        self._worker = worker
        # The last launched step, if the worker launches steps before the previous step has ended.
        self._last: StepInFlight | None = None

    @property
    def has_failed(self) -> bool:
        """Whether an error in a step has ended the session."""
        return self.end is not None and self.end.code in _FAILURES

    def close(self, reason: RequestError) -> None:
        """End the session: no further step starts, and the next answer is the error `reason`."""
        self.end = reason
        # The error wakes the session's gRPC call, whether the call waits for the answer to a step or for the
        # scheduler's next step.
        if self.awaited is not None and not self.awaited.done():
            self.awaited.set_exception(reason)
        else:
            failed: asyncio.Future[ModelOutput] = asyncio.get_running_loop().create_future()
            failed.set_exception(reason)
            self.answers.put_nowait(failed)

    def compute(self, message: SchedulerOutput) -> ModelOutput | StepInFlight:
        """Compute one step. An error ends the session, so further steps that the worker has already received are not
        computed.

        If the worker launches steps before the previous step has ended, `compute` returns as soon as the step is
        launched.
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
            # While a rank computes a step, it waits for sums of all ranks. After the step has been sent, this rank must
            # therefore launch the step before any other work.
            if ranks.size > 1:
                ranks.send(self.session.epoch, message.SerializeToString(), [chunk.drafts for chunk in step.chunks])
            step.launch(before)
            # If the worker has several ranks, all ranks finish a step before they receive the next step.
            if not worker.runner.runs_ahead or ranks.size > 1:
                return step.answer()
            self._last = step
        return step

    @contextlib.contextmanager
    def _failures_end(self) -> Iterator[None]:
        """A context for work of the session on the device thread. An error in the work ends the session. If the session
        has already ended, the context raises the reason at once, and the work does not run.
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
