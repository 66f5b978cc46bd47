"""A key pays for refused calls too: they cost checks, though the engine never counts them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from fake_worker_service import FakeWorkerService, serving
from http_edge import http_edge
from scheduler_in_process import InProcess, scheduler

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client.channel import key_metadata
from pagewire_common.calls.errors import RequestError
from scheduler_service.access.keys import ApiKey, Keyring, digest_of
from scheduler_service.access.refusals import Refusals

KEYRING = Keyring(
    ApiKey(id=name, digest=digest_of(name), tenant="", requests_per_minute=2) for name in ("bad", "worse", "good")
)
CHAT = [{"role": "user", "content": "a"}]


@pytest.fixture
async def one(byte_tokenizer_directory: Path) -> AsyncIterator[InProcess]:
    async with (
        serving(FakeWorkerService(byte_tokenizer_directory)) as address,
        scheduler(address, keyring=KEYRING) as one,
    ):
        await one.engine.model()
        yield one


async def test_beyond_a_keys_rate_of_refused_calls_no_call_of_the_key_is_read(one: InProcess) -> None:
    right = {"prompt": "a", "max_tokens": 1}
    wrong: list[tuple[str, Any]] = [("completions", right | {"x": 1}), ("chat/completions", {"messages": CHAT, "n": 0})]
    async with http_edge(one.link) as url, aiohttp.ClientSession() as session:

        async def status(path: str, body: Any, key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(f"{url}/v1/{path}", json=body, headers=headers) as answer:
                return answer.status

        assert [await status(*call, "bad") for call in wrong] == [400, 400]
        assert [await status("completions", body, "bad") for body in (right, {"x": 1})] == [429, 429]
        assert await status("completions", right, "good") == 200
    async with grpc.aio.insecure_channel(one.target) as channel:
        stub = InferenceServiceStub(channel)

        async def code(message: pb.GenerateRequest) -> grpc.StatusCode:
            call = stub.Generate(message, metadata=key_metadata("worse"))
            async for _ in call:
                pass
            return await call.code()

        found = []
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await code(pb.GenerateRequest(text="a", request_id="x" * 1000))
            found.append(refused.value.code())
        assert found == [grpc.StatusCode.INVALID_ARGUMENT] * 2 + [grpc.StatusCode.RESOURCE_EXHAUSTED]


def test_the_rate_comes_back_at_the_keys_rate_and_unread_calls_do_not_count() -> None:
    key, refusals = KEYRING.by_id["bad"], Refusals()
    for _ in range(10):
        refusals.count(key, 100.0)
    with pytest.raises(RequestError, match=r"it may send 2 a minute; try again in 30\.0 s"):
        refusals.check(key, 100.0)
    refusals.check(key, 130.1)
    refusals.check(KEYRING.by_id["good"], 100.0)
    refusals.check(None, 100.0)
