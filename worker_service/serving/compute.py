"""One step from message to answer: check it, compute it, and note the sampled tokens in the session.

To be called on the device thread. `launch` raises InvalidStepError and FencingError, which every rank raises alike.
`launch` and `finish` also raise what torch raises. After any error the session is over.
"""

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagewire.v1.scheduler_output_pb2 import ModelOutput
from worker_service.serving.codec import encode_model_output
from worker_service.session.session import Session
from worker_service.session.step import SchedulerOutput

if TYPE_CHECKING:
    from worker_service.execution.model_runner import RunningStep
    from worker_service.execution.worker import Worker  # imports torch, which the server does after its port is bound


@dataclass(frozen=True)
class Computation:
    """A step that has been launched."""

    worker: "Worker"
    session: Session
    output: SchedulerOutput
    step: "RunningStep"

    @classmethod
    def launch(
        cls, worker: "Worker", session: Session, output: SchedulerOutput, before: "RunningStep | None" = None
    ) -> "Computation":
        """Begin. before: the session's last step, if it has not finished and this one may run ahead of it."""
        chunks = session.apply(output)
        if worker.drafter is not None:
            worker.drafter.step_begins(output, chunks)
        with worker.ranks.alike():
            step = worker.runner.launch(output, chunks, before)
        session.advance(chunks)
        return cls(worker, session, output, step)

    def finish(self) -> ModelOutput:
        """Wait for the device, and answer."""
        with self.worker.ranks.alike():
            answer = self.step.finish()
        self.session.fill_in(self.step.chunks, answer.token_ids, answer.num_tokens)
        if (drafter := self.worker.drafter) is not None:
            began = time.perf_counter()
            drafts = drafter.guess(self.step.chunks, answer.timing.seconds)
            guess_us = round((time.perf_counter() - began) * 1e6)
            answer = replace(answer, draft_tokens=drafts, timing=replace(answer.timing, guess_us=guess_us))
        return encode_model_output(self.output.epoch, self.output.step_id, answer)
