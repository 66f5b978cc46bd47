"""Encodes a request for the way from a front end to the engine, and decodes it there. Long lists are sent as bytes,
because protobuf's lists take 50 ns a number to read.
"""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace

from pagewire.v1 import engine_service_pb2 as pb
from scheduler_service.core import EncoderInput, SamplingParams, SequenceGroup
from scheduler_service.wire.fields import decode_fields, encode_fields
from scheduler_service.wire.sampling import RequestSampling

KEY_BYTES = 32
"""Size of a key of the prefix cache in bytes."""


def pack(numbers: Sequence[int]) -> bytes:
    """Encode numbers in four bytes each, the lowest byte first."""
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
    """Decode 32-bit numbers, the lowest byte first."""
    numbers = array("f")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def encode_sampling(sampling: SamplingParams, submission: pb.Submit) -> None:
    encode_fields(type(sampling), replace(sampling, allowed_token_ids=()), submission.sampling)
    submission.allowed_token_ids = pack(sampling.allowed_token_ids)


def decode_group(request_id: str, submission: pb.Submit, now: float, adapter: str = "") -> SequenceGroup:
    """Decode a request to the core's type. The request arrives at time `now`. `adapter` is the fingerprint of the
    request's adapter.
    """
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
