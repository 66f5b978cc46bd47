"""A request id belongs to its tenant: what others send under the same id neither ends a stream nor tells of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_worker_service import FakeWorkerService, serving
from hypothesis import given
from hypothesis import strategies as st
from scheduler_in_process import InProcess, scheduler

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import Client, SamplingParams
from scheduler_service.frontend.output.request import request_key

LONG = SamplingParams(max_tokens=200)
RESUMES = pb.ResumeState()


@asynccontextmanager
async def standing_still(directory: Path) -> AsyncIterator[tuple[InProcess, Any]]:
    """A scheduler whose worker computes nothing, with the request "mine" of tenant "gold" in flight; and its stub."""
    worker = FakeWorkerService(directory)
    async with (
        serving(worker) as address,
        scheduler(address) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        stub = InferenceServiceStub(channel)
        worker.runs.clear()
        first = stub.Generate(gold())
        while not server.engine.requests.in_flight:
            await stub.Abort(pb.AbortRequest(request_id="unknown"))
        yield server, stub
        (group,) = [call.group for call in server.engine.requests.in_flight.values() if call.group.tenant == "gold"]
        assert list(group.prompt_token_ids) == [5, 6]
        worker.runs.set()
        assert sum([len(message.token_ids) async for message in first]) == 200


def gold(**fields: Any) -> pb.GenerateRequest:
    """The request in flight, but for these fields."""
    message = pb.GenerateRequest(request_id="mine", tenant="gold", sampling=LONG)
    if not {"text", "chat", "token_ids"} & fields.keys():
        message.token_ids.ids.extend([5, 6])
    message.MergeFrom(pb.GenerateRequest(**fields))
    return message


def others(tenant: str, **fields: Any) -> pb.GenerateRequest:
    message = gold(**fields)
    message.tenant = tenant
    return message


BREAKERS = {
    "nothing valid": (pb.GenerateRequest(request_id="mine", tenant="gold", resume=RESUMES), "INVALID_ARGUMENT"),
    "nothing valid, no tenant": (pb.GenerateRequest(request_id="mine", resume=RESUMES), "INVALID_ARGUMENT"),
    "a field out of bounds": (gold(resume=RESUMES, sampling={"top_p": 2}), "INVALID_ARGUMENT"),
    "a resume out of bounds": (gold(resume={"num_prompt_logprobs": 9}), "INVALID_ARGUMENT"),
    "another model": (gold(resume={"model_fingerprint": "0"}), "FAILED_PRECONDITION"),
    "another prompt": (gold(resume=RESUMES, token_ids={"ids": [7]}), "ALREADY_EXISTS"),
    "no resumption": (gold(), "ALREADY_EXISTS"),
}


@pytest.mark.parametrize(("message", "code"), BREAKERS.values(), ids=BREAKERS)
async def test_a_request_that_is_not_the_same_ends_no_stream(
    message: pb.GenerateRequest, code: str, byte_tokenizer_directory: Path
) -> None:
    async with standing_still(byte_tokenizer_directory) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Generate(message, timeout=20).read()
        assert error.value.code().name == code


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("tenant", ["", "silver", "gold/", "Gold"])
async def test_another_tenants_request_of_the_same_id_is_another_request(
    tenant: str, resumes: bool, byte_tokenizer_directory: Path
) -> None:
    async with standing_still(byte_tokenizer_directory) as (server, stub):
        call = stub.Generate(others(tenant, **({"resume": RESUMES} if resumes else {})))
        while len(server.engine.requests.in_flight) < 2:
            await stub.Abort(pb.AbortRequest(request_id="unknown"))
        assert (await stub.Abort(pb.AbortRequest(request_id="mine", tenant=tenant))).aborted
        assert [message.finish_reason async for message in call] == [pb.FINISH_REASON_ABORT]


async def test_an_abort_finds_no_request_of_another_tenant(byte_tokenizer_directory: Path) -> None:
    async with standing_still(byte_tokenizer_directory) as (_, stub):
        for tenant in ("", "silver", "gold/", "Gold"):
            assert not (await stub.Abort(pb.AbortRequest(request_id="mine", tenant=tenant))).aborted
        assert not (await stub.Abort(pb.AbortRequest(request_id="gold/mine"))).aborted


@pytest.mark.parametrize("resumes", [False, True])
async def test_an_abort_ends_a_call_that_is_still_being_checked(
    resumes: bool, byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the request waits for the first worker, because only that tells the model's limits."""
    worker = FakeWorkerService(byte_tokenizer_directory)
    tells = asyncio.Event()

    async def info(request: Any, context: Any) -> Any:
        await tells.wait()
        return worker.info

    monkeypatch.setattr(worker, "GetWorkerInfo", info)
    async with (
        serving(worker) as address,
        scheduler(address) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        stub = InferenceServiceStub(channel)
        call = stub.Generate(gold(**({"resume": RESUMES} if resumes else {})))
        while not (await stub.Abort(pb.AbortRequest(request_id="mine", tenant="gold"))).aborted:
            assert not server.engine.requests.in_flight
        tells.set()
        assert [message.finish_reason async for message in call] == [pb.FINISH_REASON_ABORT]
        assert not (await stub.Abort(pb.AbortRequest(request_id="mine", tenant="gold"))).aborted
        assert sum([len(message.token_ids) async for message in stub.Generate(gold())]) == 200


async def test_a_stream_that_goes_on_takes_its_own_place_on_a_full_server(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with (
        serving(worker) as address,
        scheduler(address, max_num_requests=1) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        stub = InferenceServiceStub(channel)
        worker.runs.clear()
        first = stub.Generate(gold())
        while not server.engine.requests.in_flight:
            await stub.Abort(pb.AbortRequest(request_id="unknown"))
        second = stub.Generate(gold(resume=RESUMES))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await first.read()
        assert error.value.code() is grpc.StatusCode.ABORTED
        worker.runs.set()
        assert sum([len(message.token_ids) async for message in second]) == 200


async def test_the_client_aborts_a_tenants_request(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.stops_at = 3
    async with (
        serving(worker) as address,
        scheduler(address) as server,
        Client(server.target) as client,
        Client(server.target) as other,
        aclosing(client.generate([5], LONG, request_id="mine", tenant="gold")) as stream,
    ):
        await anext(stream)
        assert not await other.abort("mine")
        assert not await client.abort("mine")
        assert await other.abort("mine", tenant="gold")
        worker.runs.set()
        assert [message.finish_reason async for message in stream][-1] == pb.FINISH_REASON_ABORT


@given(st.tuples(st.text(), st.text(min_size=1)), st.tuples(st.text(), st.text(min_size=1)))
def test_no_two_requests_have_the_same_name(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (request_key(*one) == request_key(*other)) == (one == other)
    assert request_key("a", "b/c") != request_key("a/b", "c") != request_key("", "a/b/c")
