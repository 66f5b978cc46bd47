"""An open session and its steps. The device thread computes the steps, and the event loop sends the answers. The first
error ends the session."""

import asyncio
import contextlib
import time
import traceback
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING

import grpc
import structlog

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire_common.calls.errors import RequestError
from worker_service.errors import FencingError, InvalidStepError, is_out_of_memory
from worker_service.serving.codec.answers import encode_model_output
from worker_service.serving.codec.steps import decode_scheduler_output
from worker_service.serving.device_thread import Pending
from worker_service.serving.traces import Stays
from worker_service.session.items import EncoderItem, ImageToEncode
from worker_service.session.sequence_state import NO_DRAFTS, ScheduledChunk
from worker_service.session.session import Session
from worker_service.session.step import SchedulerOutput

if TYPE_CHECKING:
    # These imports load torch, before which the server must have bound its port.
    from worker_service.execution.steps.running_step import RunningStep
    from worker_service.execution.worker import Worker

log = structlog.get_logger()

_STEPS_IN_HAND = 2
"""Maximum steps received and not yet answered. After the first step, the second starts without waiting for the
scheduler."""
_FAILURES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
Guard = Callable[[], AbstractContextManager[None]]
"""A context for the later wait for a step, in which an error ends the session."""


class StepInFlight(Pending[pb.ModelOutput]):
    """A step that has been applied to its session, used by the device thread. `RunningStep` is the part of the step on
    the device.

    `begin`, `follow` and `launch` may raise InvalidStepError or FencingError, which all ranks raise for the same step.
    `launch` and `answer` may also raise torch's errors."""

    def __init__(
        self,
        worker: "Worker",
        session: Session,
        output: SchedulerOutput,
        chunks: Sequence[ScheduledChunk],
        *,
        draft_seconds: float = 0.0,
        guard: Guard = nullcontext,
    ) -> None:
        """chunks: with the drafts to verify. draft_seconds: seconds that drafting took."""
        super().__init__()
        self.chunks = chunks
        self._worker = worker
        self._session = session
        self._output = output
        self._draft_seconds = draft_seconds
        self._guard = guard
        self._running: RunningStep

    @classmethod
    def begin(
        cls, worker: "Worker", session: Session, output: SchedulerOutput, guard: Guard = nullcontext
    ) -> "StepInFlight":
        """Apply a step to the session, and draft tokens in the room that the scheduler has reserved."""
        chunks = session.apply(output)
        output = session.with_images(output, chunks)
        if worker.drafter is None:
            return cls(worker, session, output, chunks, guard=guard)
        began = time.perf_counter()
        chunks = worker.drafter.begins(output, chunks)
        return cls(worker, session, output, chunks, draft_seconds=time.perf_counter() - began, guard=guard)

    @classmethod
    def follow(
        cls, worker: "Worker", session: Session, output: SchedulerOutput, drafts: "Sequence[array[int]]"
    ) -> "StepInFlight":
        """Apply a step on a follower. drafts: the first rank's drafts of each chunk, or empty if no chunk has
        drafts."""
        chunks = session.apply(output)
        output = session.with_images(output, chunks)
        each = drafts or repeat(NO_DRAFTS)
        chunks = [chunk.with_drafts(drafted) for chunk, drafted in zip(chunks, each, strict=False)]
        return cls(worker, session, output, chunks)

    def launch(self, before: "StepInFlight | None" = None) -> None:
        """before: the session's previous step, if it has not finished and this step is launched early."""
        worker, began = self._worker, time.perf_counter()
        with worker.ranks.together():
            running = None if before is None else before._running
            self._running = worker.runner.launch(self._output, self.chunks, running)
        if worker.drafter is not None:
            worker.drafter.launched(self._output, time.perf_counter() - began)
        self._session.advance(self.chunks)

    def is_done(self) -> bool:
        return self._running.is_done()

    def finish(self) -> pb.ModelOutput:
        with self._guard():
            return self.answer()

    def answer(self) -> pb.ModelOutput:
        """Wait for the device, append the sampled tokens to the sequences, and encode the answer."""
        chunks = self._running.chunks
        with self._worker.ranks.together():
            answer = self._running.finish()
        self._session.fill_in(chunks, answer.token_ids, answer.num_tokens)
        if (drafter := self._worker.drafter) is not None:
            began = time.perf_counter()
            wanted = drafter.ends(chunks, answer.timing.seconds)
            guess_us = round((self._draft_seconds + time.perf_counter() - began) * 1e6)
            timing = replace(answer.timing, guess_us=guess_us)
            answer = replace(answer, num_draft_tokens_wanted=wanted, timing=timing)
        return encode_model_output(self._output.epoch, self._output.step_id, answer)


class OpenSession:
    """Only the device thread calls `compute`, and both threads set `end`. Only the event loop uses the other
    attributes."""

    def __init__(self, worker: "Worker", epoch: int, stays: Stays | None = None) -> None:
        """stays: the trace spans of the sequences, if tracing is on."""
        self.session = Session(epoch, worker.limits)
        self.answers: asyncio.Queue[asyncio.Future[pb.ModelOutput] | None] = asyncio.Queue()
        """The answers in the order of the steps, followed by None."""
        self.awaited: asyncio.Future[pb.ModelOutput] | None = None
        """The answer for which the session's call is waiting."""
        self.room = asyncio.Semaphore(_STEPS_IN_HAND)
        self.stays = stays
        self.end: RequestError | None = None
        """The reason why no further step may start, or None while the session is open."""
        self._worker = worker
        # The last launched step, if the worker launches steps ahead.
        self._last: StepInFlight | None = None

    @property
    def has_failed(self) -> bool:
        """Whether an error in a step has ended the session."""
        return self.end is not None and self.end.code in _FAILURES

    def close(self, reason: RequestError) -> None:
        """End the session: no further step starts, and the next answer is the error `reason`."""
        self.end = reason
        # The error wakes the call, whether it waits for an answer or for the next step.
        if self.awaited is not None and not self.awaited.done():
            self.awaited.set_exception(reason)
        else:
            failed: asyncio.Future[pb.ModelOutput] = asyncio.get_running_loop().create_future()
            failed.set_exception(reason)
            self.answers.put_nowait(failed)

    def prepare(self, message: pb.SchedulerOutput) -> None:
        """Begin to read images that a received step encodes, while the device may compute other steps."""
        encoder = self._worker.runner.images
        if encoder is None:
            return
        encoder.received(message.epoch, message.step_id)
        if not message.items_to_encode:
            return
        wanted = {item.digest: EncoderItem(item.digest, item.part) for item in message.items_to_encode}
        encoder.processing.look_ahead(
            ImageToEncode(wanted.pop(item.digest), item.image.width, item.image.height, data)
            for new in message.new_sequences
            for item in new.items
            if item.digest in wanted and (data := item.data)
        )

    def compute(self, message: pb.SchedulerOutput) -> pb.ModelOutput | StepInFlight:
        """Compute one step. An error ends the session. If the worker launches steps ahead, returns as soon as the step
        is launched."""
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
            # A rank in a step waits for sums of all ranks, so this rank must launch the step before any other work.
            if ranks.size > 1:
                ranks.send(self.session.epoch, message.SerializeToString(), [chunk.drafts for chunk in step.chunks])
            step.launch(before)
            # With several ranks, a step is finished before the ranks receive the next step.
            if not worker.runner.runs_ahead or ranks.size > 1:
                return step.answer()
            self._last = step
        return step

    @contextlib.contextmanager
    def _failures_end(self) -> Iterator[None]:
        """A context in which an error ends the session. If the session has ended, raises the reason at once."""
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
