"""One step from message to answer: judge it, compute it, take over what was sampled."""

from typing import TYPE_CHECKING

from pagewire.v1.scheduler_output_pb2 import ModelOutput, SchedulerOutput
from worker_service.codec import decode_scheduler_output, encode_model_output
from worker_service.session import Session

if TYPE_CHECKING:
    from worker_service.worker import Worker  # imports torch, which the server does after its port is bound


def compute_step(worker: "Worker", session: Session, message: SchedulerOutput) -> ModelOutput:
    """To be called on the device thread. Raises InvalidStepError and FencingError, which every rank raises alike, and
    whatever torch does; after an error the session is over.
    """
    output = decode_scheduler_output(message, worker.limits)
    chunks = session.apply(output)
    with worker.ranks.alike():
        answer = worker.runner.execute(output, chunks)
    session.commit(chunks, answer.token_ids)
    return encode_model_output(output.epoch, output.step_id, answer)
