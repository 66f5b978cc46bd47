"""Whatever number a worker sends in whatever field, it is used or refused; none is the scheduler's own error."""

import math
from pathlib import Path
from typing import Any

import pytest
import structlog
from engines import running, submit, text_of, until
from fake_worker_service import TOKEN, FakeWorkerService, serving
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire_common.calls.errors import RequestError

MAX: dict[int, tuple[float, ...]] = {
    FieldDescriptor.TYPE_UINT32: (2**32 - 1,),
    FieldDescriptor.TYPE_UINT64: (2**64 - 1,),
    FieldDescriptor.TYPE_ENUM: (2**31 - 1,),
    FieldDescriptor.TYPE_FLOAT: (math.nan, math.inf, 3e38),
    FieldDescriptor.TYPE_DOUBLE: (math.nan, math.inf, -1.0, 1e308),
}
REPORT = {"sequence_id": 1, "width": 2, "token_ids": [TOKEN, 5], "logprobs": [-1.0, -0.5], "ranks": [2]}


def numbers(kind: type[Message]) -> list[tuple[tuple[str, ...], float]]:
    """Every numeric field, by the names on its way, and the most that it can say."""
    found: list[tuple[tuple[str, ...], float]] = []
    for field in kind.DESCRIPTOR.fields:
        if field.message_type is not None:
            found += [((field.name, *path), value) for path, value in numbers(field.message_type._concrete_class)]
        found += [((field.name,), value) for value in MAX.get(field.type, ())]
    return found


def put(message: Any, path: tuple[str, ...], value: float) -> None:
    name, *further = path
    field = message.DESCRIPTOR.fields_by_name[name]
    if further:
        below = getattr(message, name)
        if field.is_repeated:
            below = below[0] if below else below.add()
        put(below, tuple(further), value)
    elif field.is_repeated:
        getattr(message, name)[:1] = [value]
    else:
        setattr(message, name, value)


async def test_what_a_worker_says_of_itself_is_used_or_refused(byte_tokenizer_directory: Path) -> None:
    for path, value in numbers(worker_pb.GetWorkerInfoResponse):
        worker = FakeWorkerService(byte_tokenizer_directory)
        put(worker.info, path, value)
        with structlog.testing.capture_logs() as logs:
            async with serving(worker) as address, running(address) as engine:
                (loop,) = engine.workers.all
                await until(lambda loop=loop: loop.admits or loop.last_error != "not connected yet")
                if loop.admits:
                    assert await text_of(engine, await submit(engine, "a", [5])) == "ggggg", path
        assert not [line for line in logs if line["log_level"] == "error"], path


@pytest.mark.usefixtures("impatient")
async def test_what_a_worker_answers_is_used_or_costs_its_session(byte_tokenizer_directory: Path) -> None:
    """NaN and +inf of a prompt's tokens say that its request has failed."""
    worker = FakeWorkerService(byte_tokenizer_directory)
    lies: list[tuple[tuple[str, ...], float]] = []

    def spoil(answer: pb.ModelOutput) -> pb.ModelOutput:
        answer.logprobs.add(**REPORT)
        if answer.step_id == 1:
            answer.prompt_logprobs.add(**REPORT)
        if lies:
            path, value = lies.pop()
            if path[0] == "vectors":
                answer.vectors.add()
            put(answer, path, value)
        return answer

    worker.spoil, failed = spoil, "no token could be chosen: the model's output was not finite"
    for path, value in numbers(pb.ModelOutput):
        lies.append((path, value))
        fails = path == ("prompt_logprobs", "logprobs") and not value < math.inf
        with structlog.testing.capture_logs() as logs:
            async with serving(worker) as address, running(address) as engine:
                try:
                    state = await submit(engine, "a", [5, TOKEN], logprobs=1, prompt_logprobs=1)
                    said = await text_of(engine, state)
                except RequestError as error:
                    said = str(error)
        assert said == (failed if fails else "ggggg"), path
        assert not [line for line in logs if line["log_level"] == "error"], path
