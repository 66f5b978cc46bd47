"""One step from message to answer: check it, guess, compute it, and note the sampled tokens in the session.

To be called on the device thread. `plan` raises InvalidStepError and FencingError, and so does `launch`, in every rank
alike. `launch` and `finish` also raise what torch raises. After any error the session is over.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING

from pagewire.v1.scheduler_output_pb2 import ModelOutput
from worker_service.serving.codec import encode_model_output
from worker_service.session.session import NO_DRAFTS, ScheduledChunk, Session
from worker_service.session.step import SchedulerOutput

if TYPE_CHECKING:
    from worker_service.execution.steps.model_runner import RunningStep
    from worker_service.execution.worker import Worker  # imports torch, which the server does after its port is bound


@dataclass(frozen=True)
class Plan:
    """A step that has been applied to the session, and is to be computed."""

    output: SchedulerOutput
    chunks: Sequence[ScheduledChunk]
    guess_seconds: float = 0.0
    """That it took to guess."""


def plan(worker: "Worker", session: Session, output: SchedulerOutput) -> Plan:
    """Apply a step, and guess as far as it has room for it."""
    chunks = session.apply(output)
    if worker.drafter is None:
        return Plan(output, chunks)
    began = time.perf_counter()
    chunks = worker.drafter.begins(output, chunks)
    return Plan(output, chunks, time.perf_counter() - began)


def follow(session: Session, output: SchedulerOutput, drafts: "Sequence[array[int]]") -> Plan:
    """Apply a step for which the first rank has guessed. drafts: of each chunk; nothing if there are none of any."""
    chunks = session.apply(output)
    return Plan(
        output,
        [chunk.with_drafts(drafted) for chunk, drafted in zip(chunks, drafts or repeat(NO_DRAFTS), strict=False)],
    )


@dataclass(frozen=True)
class Computation:
    """A step that has been launched."""

    worker: "Worker"
    session: Session
    plan: Plan
    step: "RunningStep"

    @classmethod
    def launch(
        cls, worker: "Worker", session: Session, planned: Plan, before: "RunningStep | None" = None
    ) -> "Computation":
        """Begin. before: the session's last step, if it has not finished and this one may run ahead of it."""
        began = time.perf_counter()
        with worker.ranks.alike():
            step = worker.runner.launch(planned.output, planned.chunks, before)
        if worker.drafter is not None:
            worker.drafter.launched(planned.output, time.perf_counter() - began)
        session.advance(planned.chunks)
        return cls(worker, session, planned, step)

    def finish(self) -> ModelOutput:
        """Wait for the device, and answer."""
        with self.worker.ranks.alike():
            answer = self.step.finish()
        self.session.fill_in(self.step.chunks, answer.token_ids, answer.num_tokens)
        if (drafter := self.worker.drafter) is not None:
            began = time.perf_counter()
            wanted = drafter.ends(self.step.chunks, answer.timing.seconds)
            guess_us = round((self.plan.guess_seconds + time.perf_counter() - began) * 1e6)
            timing = replace(answer.timing, guess_us=guess_us)
            answer = replace(answer, num_draft_tokens_wanted=wanted, timing=timing)
        return encode_model_output(self.plan.output.epoch, self.plan.output.step_id, answer)
