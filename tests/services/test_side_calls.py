"""Calls beside Generate are limited in number and in bytes, and Generate does not wait for them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from engines import running, until
from fake_worker_service import FakeWorkerService, serving
from scheduler_in_process import InProcess, scheduler

from pagewire.v1 import admin_service_pb2 as admin_pb
from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.admin_service_pb2_grpc import AdminServiceStub
from pagewire_client import Client, SamplingParams
from pagewire_client.llm import collect
from pagewire_common.calls.errors import RequestError
from scheduler_service.engine.calls import admission
from scheduler_service.engine.calls.side_calls import SideCalls
from scheduler_service.frontend.link.engine_call import EngineCall
from scheduler_service.frontend.servicer import InferenceServicer
from scheduler_service.operations.admin_servicer import MAX_WATCHES

CALLS: dict[str, Callable[[InferenceServicer], Any]] = {
    "Tokenize": lambda servicer: servicer.Tokenize(pb.TokenizeRequest(text="hello"), None),  # type: ignore[arg-type]
    "Detokenize": lambda servicer: servicer.Detokenize(pb.DetokenizeRequest(token_ids=[5]), None),  # type: ignore[arg-type]
    "GetModel": lambda servicer: servicer.GetModel(pb.GetModelRequest(), None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_calls_that_wait_for_the_first_worker_are_limited_in_number(
    call: Callable[[InferenceServicer], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_SIDE_CALLS", 2)
    async with running("127.0.0.1:1", no_worker_timeout=50) as engine:
        servicer = InferenceServicer(engine.link)
        waiting = [asyncio.create_task(other(servicer)) for other in list(CALLS.values())[:2]]
        await until(lambda: engine.requests.admission._side_calls._num_calls == 2)
        for _ in range(2):  # one that was refused gives no place back, as it had none
            with pytest.raises(RequestError, match="2 Tokenize, Detokenize and GetModel calls are in flight") as error:
                await call(servicer)
            assert error.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        with EngineCall(engine.link) as one, EngineCall(engine.link) as other:  # their places are free again
            await one.admit("", 0)
            await other.admit("", 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda servicer: servicer.Tokenize(pb.TokenizeRequest(text="x" * 60), None),
        lambda servicer: servicer.Detokenize(pb.DetokenizeRequest(token_ids=[5] * 60), None),
    ],
    ids=["Tokenize", "Detokenize"],
)
async def test_calls_that_wait_for_the_first_worker_are_limited_in_bytes(
    call: Callable[[InferenceServicer], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_SIDE_BYTES", 100)
    async with running("127.0.0.1:1", no_worker_timeout=50) as engine:
        servicer = InferenceServicer(engine.link)
        first = asyncio.create_task(call(servicer))
        await until(lambda: engine.requests.admission._side_calls._num_calls)
        async with asyncio.timeout(10):
            with pytest.raises(RequestError, match="calls of 62 bytes are in flight, and this one has 62") as error:
                await call(servicer)
        assert error.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_requests_and_other_calls_take_no_places_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_SIDE_CALLS", 1)
    async with running("127.0.0.1:1", max_num_requests=1) as engine:
        for keys in (("", "a request"), ("a request", "")):
            with EngineCall(engine.link) as one, EngineCall(engine.link) as other:
                for call, key in zip((one, other), keys, strict=True):
                    await call.admit(key, 0)


def test_bytes_count_as_well_as_calls_and_a_call_alone_is_never_too_large() -> None:
    calls = SideCalls("Any", max_calls=9, max_bytes=100)
    with calls.place(1000):
        pass
    with calls.place(60), calls.place(40):
        with pytest.raises(RequestError, match="calls of 100 bytes are in flight, and this one has 1"), calls.place(1):
            pass
        with calls.place(0):
            pass
    with calls.place(100):
        pass


@pytest.fixture
async def one(byte_tokenizer_directory: Path) -> AsyncIterator[InProcess]:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, scheduler(address) as one:
        await one.engine.model()
        yield one


async def test_watches_are_limited_and_one_that_ends_makes_place(one: InProcess) -> None:
    async with grpc.aio.insecure_channel(one.admin_target) as channel:
        stub = AdminServiceStub(channel)
        request = admin_pb.WatchClusterStateRequest(interval_ms=60_000)
        watches = [stub.WatchClusterState(request) for _ in range(MAX_WATCHES)]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError, match="64 WatchClusterState calls are in flight") as error:
            await stub.WatchClusterState(request).read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watches.pop().cancel()
        while True:
            try:
                await stub.WatchClusterState(request).read()
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.01)


class NeverReads:
    """A context whose client reads nothing."""

    async def write(self, message: Any) -> None:
        await asyncio.Event().wait()


async def test_a_watch_that_is_not_read_ends_and_gives_its_place_back() -> None:
    async with running("127.0.0.1:1", stall_timeout=0.01) as engine:
        for _ in range(MAX_WATCHES + 1):
            with pytest.raises(RequestError, match=r"the client read nothing for 0\.01 s"):
                await engine.admin.WatchClusterState(admin_pb.WatchClusterStateRequest(), NeverReads())  # type: ignore[arg-type]
            assert not engine.admin._watches._num_calls


async def test_a_prompt_is_encoded_while_every_side_call_waits_for_its_thread(one: InProcess) -> None:
    tokenizer = (await one.engine.model()).tokenizer
    assert tokenizer is not None
    is_blocked, goes_on = threading.Event(), threading.Event()

    def block() -> None:
        is_blocked.set()
        goes_on.wait(60)

    blocked = tokenizer._side_thread.submit(block)
    await asyncio.to_thread(is_blocked.wait)
    async with Client(one.target) as client:
        others = [asyncio.create_task(client.tokenize("hello" * 50)) for _ in range(16)]
        others.append(asyncio.create_task(client.detokenize([73] * 20)))  # type: ignore[arg-type]
        completion = await collect(client, "hello", SamplingParams(max_tokens=3))
        assert completion.outputs[0].text == "ggg"
        completion = await collect(client, [{"role": "user", "content": "hi"}], SamplingParams(max_tokens=3))
        assert not any(task.done() for task in others)
        goes_on.set()
        await asyncio.gather(*others)
    blocked.result()
