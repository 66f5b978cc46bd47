"""The stages of one step: apply it to the session, draft tokens, launch it, wait for the results, append the sampled
tokens, and encode the answer.

All methods run on the device thread. `begin`, `follow` and `launch` may raise InvalidStepError or FencingError; all
ranks raise the error for the same step. `launch` and `answer` may also raise torch's errors. Any error ends the
session.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING

from pagewire.v1.scheduler_output_pb2 import ModelOutput
from worker_service.serving.codec import encode_model_output
from worker_service.serving.device_thread import Pending
from worker_service.session.session import NO_DRAFTS, ScheduledChunk, Session
from worker_service.session.step import SchedulerOutput

if TYPE_CHECKING:
    # These imports load torch. At run time, torch must not be loaded before the server has bound its port.
    from worker_service.execution.steps.running_step import RunningStep
    from worker_service.execution.worker import Worker

Guard = Callable[[], AbstractContextManager[None]]
"""A context in which the device thread later waits for the step, so that an error ends the session."""


class StepInFlight(Pending[ModelOutput]):
    """A step that has been applied to its session, and that is launched and answered with this object.

    The class `RunningStep` represents the part of a step that runs on the device, and knows neither gRPC messages nor
    sessions.
    """

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
        """Create an object for a step that has been applied to its session.

        chunks: the step's chunks, with the drafts to verify. draft_seconds: the seconds that drafting took.
        """
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
        """Apply a step to the session, and draft tokens within the room that the scheduler has reserved."""
        chunks = session.apply(output)
        if worker.drafter is None:
            return cls(worker, session, output, chunks, guard=guard)
        began = time.perf_counter()
        chunks = worker.drafter.begins(output, chunks)
        return cls(worker, session, output, chunks, draft_seconds=time.perf_counter() - began, guard=guard)

    @classmethod
    def follow(
        cls, worker: "Worker", session: Session, output: SchedulerOutput, drafts: "Sequence[array[int]]"
    ) -> "StepInFlight":
        """Apply a step to the session of a follower, with the drafts of the first rank.

        drafts: the drafts of each chunk, or an empty sequence if no chunk has drafts.
        """
        chunks = session.apply(output)
        each = drafts or repeat(NO_DRAFTS)
        chunks = [chunk.with_drafts(drafted) for chunk, drafted in zip(chunks, each, strict=False)]
        return cls(worker, session, output, chunks)

    def launch(self, before: "StepInFlight | None" = None) -> None:
        """Launch the step on the device.

        before: the session's previous step, if it has not finished and this step can be launched early.
        """
        worker, began = self._worker, time.perf_counter()
        with worker.ranks.together():
            running = None if before is None else before._running
            self._running = worker.runner.launch(self._output, self.chunks, running)
        if worker.drafter is not None:
            worker.drafter.launched(self._output, time.perf_counter() - began)
        self._session.advance(self.chunks)

    def is_done(self) -> bool:
        """Whether `finish` would return without waiting, see `Pending`."""
        return self._running.is_done()

    def finish(self) -> ModelOutput:
        """Return the encoded answer, see `Pending`. An error ends the session."""
        with self._guard():
            return self.answer()

    def answer(self) -> ModelOutput:
        """Wait for the device, append the sampled tokens to the session's sequences, and return the encoded answer."""
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
