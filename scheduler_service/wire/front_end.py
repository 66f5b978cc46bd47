"""The stream between a front end and the engine: requests, and the pace of messages.

Long lists are bytes: protobuf's lists take 50 ns a number to read. A message costs both processes together 70 to 150
µs, as do the tokens of 100 sequences.
"""

import asyncio
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace

from pagewire.v1 import engine_service_pb2 as pb
from scheduler_service.core import EncoderInput, SamplingParams, SequenceGroup
from scheduler_service.wire.fields import decode_fields, encode_fields
from scheduler_service.wire.sampling import RequestSampling

KEY_BYTES = 32
"""Bytes of a key of the prefix cache."""
SECONDS_BETWEEN = 0.002
"""Seconds between messages of a busy stream."""


class Pace:
    __slots__ = ("_last", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = 0.0

    async def wait(self) -> None:
        pause = self._last + SECONDS_BETWEEN - self._loop.time()
        if pause > 0:
            await asyncio.sleep(pause)
        self._last = self._loop.time()


def pack(numbers: Sequence[int]) -> bytes:
    """Four bytes a number, low byte first."""
    packed = array("I", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(data: bytes) -> "array[int]":
    numbers = array("I")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def floats(data: bytes) -> "array[float]":
    """32-bit numbers, low byte first."""
    numbers = array("f")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def encode_sampling(sampling: SamplingParams, submission: pb.Submit) -> None:
    encode_fields(type(sampling), replace(sampling, allowed_token_ids=()), submission.sampling)
    submission.allowed_token_ids = pack(sampling.allowed_token_ids)


def decode_group(request_id: str, submission: pb.Submit, now: float, adapter: str = "") -> SequenceGroup:
    """`adapter`: the fingerprint."""
    sampling = decode_fields(RequestSampling, submission.sampling)
    if submission.allowed_token_ids:
        sampling = replace(sampling, allowed_token_ids=unpack(submission.allowed_token_ids))
    group = SequenceGroup(
        request_id,
        unpack(submission.prompt_token_ids),
        sampling,
        submission.cache_root,
        priority=submission.priority,
        tenant=submission.tenant,
        arrived_at=now,
        output_token_ids=tuple(output.token_ids for output in submission.output_token_ids),
        ended=frozenset(submission.ended),
        adapter_id=adapter,
        encoder_input=(
            decode_fields(EncoderInput, submission.encoder_input) if submission.HasField("encoder_input") else None
        ),
    )
    group.trace_parent = submission.trace_parent
    keys = submission.block_keys
    group.sequences[0].block_keys += [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
    return group
