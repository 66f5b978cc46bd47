"""An output's gain in one step, if the gain is more than a token."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.v1 import engine_service_pb2 as pb
from pagewire.v1 import scheduler_output_pb2 as wire
from pagewire.v1.sequence_group_pb2 import SequenceStatus as Status
from scheduler_service.core import SequenceStatus
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.wire.fields import decode_enum


@dataclass(slots=True)
class Gained:
    """The gain of an output in one step.

    `token_id`: the new token; None while the prompt is computed.
    `status`: set if the output ended in this step.
    `prompt_logprobs`: log-probabilities of the prompt's positions from `prompt_start` on.
    `vectors`: the output's new vectors. With a vector for each token, the first new vector is at position
    `prompt_start` - 1.
    """

    index: int
    token_id: int | None
    status: SequenceStatus | None = None
    stop_token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    prompt_start: int = 0
    vectors: bytes = b""


def decode_gained(message: pb.OutputGained) -> Gained:
    logprobs = _decode_logprobs(message.logprobs)
    return Gained(
        message.index,
        message.token_id if message.HasField("token_id") else None,
        decode_enum(SequenceStatus, Status.DESCRIPTOR, message.status) if message.status else None,
        message.stop_token_id if message.HasField("stop_token_id") else None,
        logprobs[0] if logprobs else None,
        _decode_logprobs(message.prompt_logprobs),
        message.prompt_start,
        message.vectors,
    )


def _decode_logprobs(columns: wire.SampleLogprobs) -> list[TokenLogprobs]:
    width, token_ids, logprobs = columns.width, list(columns.token_ids), list(columns.logprobs)
    return [
        TokenLogprobs(token_ids[at * width : (at + 1) * width], logprobs[at * width : (at + 1) * width], rank)
        for at, rank in enumerate(columns.ranks)
    ]
