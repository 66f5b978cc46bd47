"""A call of many texts is one request: it has one place, memory for some of its texts, and leaves nothing behind."""

import asyncio
from pathlib import Path

import grpc
import pytest
from embedding_helpers import assert_nothing_is_left, encoder_settings, serving
from engines import until
from tiny_encoder import write_encoder
from worker_in_process import slow_down

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import POOLING_ALL, Client
from scheduler_service.access.keys import ApiKey, Keyring, digest_of
from scheduler_service.frontend.calls.text_calls import IN_FLIGHT, IN_FLIGHT_BYTES


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


async def test_a_call_that_is_left_frees_everything(encoder: Path) -> None:
    async with serving(encoder, **encoder_settings()) as (one, worker), Client(one.target) as client:
        slow_down(worker, 0.01)
        request = pb.EmbedRequest(inputs=[pb.EmbedInput(text="a" * 60)] * 2000)
        call = client._stub.Embed(request)
        await call.read()
        assert one.engine.requests.in_flight
        call.cancel()
        await assert_nothing_is_left(one)
        assert len(await client.embed(["a"])) == 1


async def test_a_client_that_does_not_read_holds_little(encoder: Path) -> None:
    """Of its texts as many are computed as fit what may wait for it, and others go on."""
    async with serving(encoder, **encoder_settings()) as (one, _), Client(one.target) as client:
        request = pb.EmbedRequest(inputs=[pb.EmbedInput(text="a" * 60)] * 2000, pooling=POOLING_ALL)
        call = client._stub.Embed(request)
        await call.read()
        for _ in range(20):
            assert await client.embed(["b"])
        await until(
            lambda: len(one.engine.requests.in_flight) <= IN_FLIGHT
        )  # the last short call may not be closed yet
        call.cancel()
        await assert_nothing_is_left(one)


async def test_texts_with_large_vectors_take_turns(tmp_path: Path) -> None:
    """A call of more than may be in flight is served, where its texts fit one by one."""
    folder = write_encoder(tmp_path, max_position_embeddings=1200, hidden_size=960, num_hidden_layers=1)
    settings = encoder_settings() | {"max_num_batched_tokens": 1200}
    async with serving(folder, {"request_memory": 0.05}, **settings) as (one, _), Client(one.target) as client:
        request = pb.EmbedRequest(inputs=[pb.EmbedInput(text="a" * 1100)] * 10, pooling=POOLING_ALL)
        num_bytes, most = 0, 0
        async for response in client._stub.Embed(request):
            num_bytes += len(response.vectors)
            most = max(most, len(one.engine.requests.in_flight))
        assert num_bytes == 10 * 1102 * 960 * 4
        assert 2 <= most <= IN_FLIGHT_BYTES // (1102 * 960 * 4)
        await assert_nothing_is_left(one)


async def test_texts_of_a_call_take_no_places(encoder: Path) -> None:
    async with (
        serving(encoder, {"max_num_requests": 9}, **encoder_settings()) as (one, worker),
        Client(one.target, retry_for=0) as client,
    ):
        slow_down(worker, 0.002)
        calls = [asyncio.create_task(client.embed(["a" * 40] * 70)) for _ in range(8)]
        await until(lambda: len(one.engine.requests.in_flight) > 100)
        while not all(call.done() for call in calls):
            assert len(await client.embed(["b"])) == 1
        assert [len(call.result()) for call in calls] == [70] * 8
        await assert_nothing_is_left(one)


async def test_texts_of_a_call_wait_for_memory(encoder: Path) -> None:
    """Of a call that was admitted no text is refused for the others, however little memory there is."""
    async with (
        serving(encoder, {"request_memory": 2**20 / 2**30}, **encoder_settings()) as (one, worker),
        Client(one.target, retry_for=0) as client,
    ):
        slow_down(worker, 0.002)
        call = asyncio.create_task(client.embed(["a" * 40] * 150))
        most_bytes = most_texts = 0
        while not call.done():
            most_bytes = max(most_bytes, one.engine.requests.admission.num_bytes)
            most_texts = max(most_texts, len(one.engine.requests.in_flight))
            await asyncio.sleep(0)
        assert len(await call) == 150
        assert 2**19 < most_bytes <= 2**20
        assert 2 <= most_texts <= 16
        await assert_nothing_is_left(one)


async def test_a_call_holds_memory_for_its_longest_text_from_the_beginning(tmp_path: Path) -> None:
    """So that none is refused in the middle of a call for what others have taken meanwhile."""
    folder = write_encoder(tmp_path, max_position_embeddings=1200, hidden_size=960, num_hidden_layers=1)
    settings = encoder_settings() | {"max_num_batched_tokens": 1200}
    async with serving(folder, **settings) as (one, worker), Client(one.target, retry_for=0) as client:
        slow_down(worker, 0.05)
        texts = [*["a"] * 3, "a" * 1100]
        call = asyncio.create_task(client.embed(texts, pooling=POOLING_ALL))
        await until(lambda: len(one.engine.requests.in_flight) > 0)
        one.engine.requests.admission._memory = one.engine.requests.admission.num_bytes  # others have all of the rest
        with pytest.raises(grpc.aio.AioRpcError, match="requests in flight hold"):
            await client.embed(["a"])
        assert [len(found.vectors) for found in await call] == [3, 3, 3, 1102]


async def test_a_call_goes_on_while_the_server_shuts_down(encoder: Path) -> None:
    """Also with the texts that the engine has not seen by then; but not beyond the grace."""
    for grace, is_served in ((60, True), (0.05, False)):
        async with serving(encoder, **encoder_settings()) as (one, worker), Client(one.target, retry_for=0) as client:
            slow_down(worker, 0.01)
            call = asyncio.create_task(client.embed(["a" * 60] * 300))
            await until(lambda: one.engine.workers.all[0].num_steps > 3)
            draining = asyncio.create_task(one.engine.drain(grace))
            await until(lambda: one.engine.is_draining)
            with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
                await client.embed(["a"])
            if is_served:
                assert len(await call) == 300
            else:
                with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as error:
                    await call
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            await draining
            await assert_nothing_is_left(one)


async def test_a_call_of_many_texts_is_one_request_of_its_key(encoder: Path) -> None:
    key = ApiKey(id="one", digest=digest_of("secret"), tenant="t", concurrency=1, requests_per_minute=3)
    settings = {"keyring": Keyring([key])}
    async with (
        serving(encoder, settings, **encoder_settings()) as (one, _),
        Client(one.target, api_key="secret", retry_for=0) as client,
    ):
        for _ in range(3):
            assert len(await client.embed(["a"] * 300)) == 300
        with pytest.raises(grpc.aio.AioRpcError, match="has used its 3 requests a minute"):
            await client.embed(["a"])
        await assert_nothing_is_left(one)


async def test_a_key_is_charged_for_the_tokens_of_its_texts(encoder: Path) -> None:
    key = ApiKey(id="one", digest=digest_of("secret"), tenant="t", tokens_per_minute=4)
    async with (
        serving(encoder, {"keyring": Keyring([key])}, **encoder_settings()) as (one, _),
        Client(one.target, api_key="secret", retry_for=0) as client,
    ):
        await client.embed(["a"])  # of three tokens, with the two that the model expects: one is left
        await client.embed(["a"])
        with pytest.raises(grpc.aio.AioRpcError, match="has used its 4 tokens a minute"):
            await client.embed(["a"])
