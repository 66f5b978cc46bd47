"""However a call ends, its turn to write ends with it, and is another client's; and nothing of it stays in memory."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from engines import until
from fake_worker_service import FakeWorkerService, serving
from scheduler_in_process import InProcess, scheduler

from bench.fleet.http2 import Connection
from bench.fleet.raw_load import PATH
from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client, SamplingParams
from pagewire_client.llm import collect
from pagewire_common.calls.errors import PatientWriter
from scheduler_service.core import Sequence, SequenceGroup
from scheduler_service.engine.calls.calls import Call
from scheduler_service.frontend.link.engine_call import EngineCall
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.frontend.output.streams import OutputDelta, OutputStream

POISON = 99
LONG = SamplingParams(max_tokens=400)


async def ended(client: Client, one: InProcess) -> None:
    await collect(client, [5], SamplingParams(max_tokens=7))


async def aborted(client: Client, one: InProcess) -> None:
    async for _ in client.generate([5], LONG, request_id="call"):
        await client.abort("call")


async def failed(client: Client, one: InProcess) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="workers failed in a row"):
        await collect(client, [POISON])


async def hung_up_while_it_read(client: Client, one: InProcess) -> None:
    stream = client.generate([5], LONG)
    await anext(stream)
    await stream.aclose()


async def hung_up_without_reading(client: Client, one: InProcess) -> None:
    """Its client opens no window, so a write is under way for as long as the client is there."""
    host, _, port = one.target.rpartition(":")
    transport, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection(PATH, lambda *_: None, lambda _: None, window=0), host, int(port)
    )
    prompt = pb.TokenIds(ids=[5])
    connection.begin(pb.GenerateRequest(request_id="call", token_ids=prompt, sampling=LONG).SerializeToString())
    await until(lambda: "call" in one.engine.requests.in_flight)
    group = one.engine.requests.in_flight["call"].group
    await until(lambda: group.is_finished)  # of all that, no more than the beginning is written
    await until(lambda: one.link.requests.turns.num_held == 1)
    transport.abort()


@pytest.fixture
async def one(byte_tokenizer_directory: Path) -> AsyncIterator[InProcess]:
    worker = FakeWorkerService(byte_tokenizer_directory, poison=POISON)
    async with serving(worker) as address, scheduler(address) as one:
        yield one


WAYS_TO_END = [ended, aborted, failed, hung_up_while_it_read, hung_up_without_reading]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("call", WAYS_TO_END)
async def test_a_call_that_is_over_holds_no_turn(
    one: InProcess, call: Callable[[Client, InProcess], Awaitable[None]]
) -> None:
    async with Client(one.target) as client:
        await call(client, one)
        await until(lambda: not one.engine.requests.in_flight)
    assert one.link.requests.turns.num_held == 0


def kept() -> list[str]:
    kinds = (Call, EngineCall, RequestState, SequenceGroup, Sequence, OutputStream, OutputDelta, PatientWriter)
    return [type(item).__name__ for item in gc.get_objects() if type(item) in kinds]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("call", WAYS_TO_END)
async def test_a_call_that_is_over_leaves_nothing_to_the_collector(
    one: InProcess, call: Callable[[Client, InProcess], Awaitable[None]]
) -> None:
    """Prompts may be long: memory must not depend on when Python's collector runs."""
    async with Client(one.target) as client:
        await call(client, one)
        await until(lambda: not one.engine.requests.in_flight)
        gc.collect()
        gc.disable()
        try:
            await call(client, one)
            await until(lambda: not one.engine.requests.in_flight)
            async with asyncio.timeout(10):
                await until(lambda: not kept())
        except TimeoutError:
            pytest.fail(f"still there: {kept()}")
        finally:
            gc.enable()
