"""Whatever number a scheduler sends in whatever field, it is obeyed or refused; none is the worker's own error."""

import math
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from message_helpers import new_message
from sampler_numbers import OTHERS
from served_worker import PROMPT, Service

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import sequence_group_pb2 as group_pb

UNSIGNED = {FieldDescriptor.TYPE_UINT32: (2**32 - 1,), FieldDescriptor.TYPE_UINT64: (2**64 - 1,)}
FLOATS = (math.nan, 3.4e38, -3.4e38)
DOUBLES = (*FLOATS, 1.7e308, -1.7e308, 5e-324)
OTHER_VALUES = UNSIGNED | {FieldDescriptor.TYPE_FLOAT: FLOATS, FieldDescriptor.TYPE_DOUBLE: DOUBLES}
REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


def steps() -> list[pb.SchedulerOutput]:
    """A session in which every kind of change is made that a worker without an encoder, adapters and guesses takes."""
    sampled = new_message(
        *(1, PROMPT, range(6)),
        **OTHERS,
        logprobs=2,
        seed=7,
        index=1,
        min_tokens=2,
        eos_token_ids=[2],
        prompt_logprobs=1,
        logit_bias={3: 1.0},
        bad_words=[group_pb.TokenSequence(token_ids=[5, 6])],
    )
    greedy = new_message(2, PROMPT, range(32, 40), allowed_token_ids=[3, 4, 5])
    transcript = new_message(3, PROMPT, range(12, 18))
    transcript.sampling.transcript.MergeFrom(
        group_pb.TranscriptParams(
            first_timestamp=100, max_initial=5, num_text_tokens=100, suppressed=[1], begin_suppressed=[2]
        )
    )
    pooled = new_message(4, PROMPT, range(18, 24))
    pooled.sampling.pooling.MergeFrom(
        group_pb.PoolingParams(type=group_pb.POOLING_TYPE_MEAN, dimensions=8, num_first_tokens=3)
    )
    return [
        pb.SchedulerOutput(
            new_sequences=[sampled, greedy, transcript, pooled],
            sequence_ids=[1, 2, 3, 4],
            num_scheduled_tokens=[len(PROMPT)] * 4,
        ),
        pb.SchedulerOutput(
            forks=[pb.Fork(parent_sequence_id=2, child_sequence_id=5, num_tokens=22, num_computed_tokens=21)],
            block_table_updates=[pb.BlockTableUpdate(sequence_id=1, start=5, block_ids=[5, 24])],
            sequence_ids=[1, 2, 3],
            num_scheduled_tokens=[1, 1, 1],
            samples=[True, True, True],
            num_draft_tokens=[0, 0, 0],
            finished=[4],
        ),
        pb.SchedulerOutput(
            preempted=[3],
            sequence_ids=[1, 2],
            blocks_to_swap_out=pb.BlockMapping(sources=[12], destinations=[0]),
            blocks_to_copy=pb.BlockMapping(sources=[13], destinations=[30]),
        ),
        pb.SchedulerOutput(sequence_ids=[1, 2], blocks_to_swap_in=pb.BlockMapping(sources=[0], destinations=[31])),
        pb.SchedulerOutput(sequence_ids=[1, 2]),
    ]


def extremes(message: Message, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every numeric field below a message, by its path, and what is to be done to a copy of it."""
    for field in message.DESCRIPTOR.fields:
        where = f"{path}.{field.name}" if path else field.name
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield from (
                (f"{where}[{key}]={value}", ("map", field.name, key, value))
                for key, value in ((2**32 - 1, 1.0), *((3, value) for value in DOUBLES))
            )
        elif field.message_type is not None:
            below = getattr(message, field.name)
            for index in range(len(below) if field.is_repeated else 1):
                one = below[index] if field.is_repeated else below
                for name, change in extremes(one, f"{where}[{index}]"):
                    yield name, ("below", field.name, index if field.is_repeated else None, change)
        else:
            values = OTHER_VALUES.get(field.type, ())
            yield from ((f"{where}={value}", ("set", field.name, field.is_repeated, value)) for value in values)


def do(message: Any, change: Any) -> None:
    match change:
        case ("map", name, key, value):
            getattr(message, name)[key] = value
        case ("below", name, index, further):
            do(getattr(message, name) if index is None else getattr(message, name)[index], further)
        case ("set", name, True, value):
            column = getattr(message, name)
            column[:1] = [value]
        case ("set", name, False, value):
            setattr(message, name, value)


async def ended(service: Service, changed: int = -1, change: Any = None) -> Any:
    client = service.session()
    try:
        for number, step in enumerate(steps()):
            step.epoch, step.step_id = client.epoch, number + 1
            if number == changed:
                do(step, change)
            await client.call.write(step)
            answer = await client.call.read()
            if answer is grpc.aio.EOF:
                return await client.call.code(), await client.call.details()
    except grpc.aio.AioRpcError:
        return await client.call.code(), await client.call.details()
    finally:
        client.call.cancel()
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize("worker", ["step by step"], indirect=True)
async def test_numbers_are_obeyed_or_refused_and_never_an_error_of_the_workers(service: Service) -> None:
    assert await ended(service) == (grpc.StatusCode.OK, "")
    for number, step in enumerate(steps()):
        for name, change in extremes(step):
            code, details = await ended(service, number, change)
            assert code in (grpc.StatusCode.OK, *REFUSED), (number, name, details)
    assert await ended(service) == (grpc.StatusCode.OK, "")
