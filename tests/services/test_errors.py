import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from fake_worker_service import FakeWorkerService
from fake_worker_service import serving as fake_worker
from locked import refused
from scheduler_in_process import scheduler

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import ErrorInterceptor, RequestError
from pagewire_common.calls.request_limits import RequestLimits


class Deaf:
    """A context whose client can no longer be sent anything."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise grpc.aio.InternalError("Failed grpc_call_start_batch")


async def test_an_error_that_cannot_be_sent_cancels_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    """As for a client that reads nothing: the messages that it has not read are in the way of the status."""

    async def stall(request: Any, context: Any) -> None:
        raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "the client read nothing for 60 s")

    async def find(_: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(stall)

    handler = await ErrorInterceptor().intercept_service(find, SimpleNamespace(method="/pagewire.v1.Some/Method"))  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        await handler.unary_unary(None, Deaf())
    assert "the client read nothing for 60 s" in capsys.readouterr().out


@asynccontextmanager
async def serving(interceptor: ErrorInterceptor, handler: Any) -> AsyncIterator[Any]:
    """A server of one method; gives the method, from bytes to bytes."""
    server = grpc.aio.server(interceptors=[interceptor])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("pagewire.v1.Some", {"Method": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel.unary_unary("/pagewire.v1.Some/Method")
    finally:
        await server.stop(None)


@pytest.mark.parametrize("letter", ["x", " ", "\n", "%", "é", "\U0001f600"])
async def test_a_sentence_with_a_clients_own_words_is_cut_to_what_fits_into_a_status(letter: str) -> None:
    """gRPC replaces a larger status by one of its own, RESOURCE_EXHAUSTED, which would be wrong for an invalid
    request."""

    async def find(request: Any, context: Any) -> None:
        raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, f"there is no worker {letter * int(request)}")

    async with serving(ErrorInterceptor(), grpc.unary_unary_rpc_method_handler(find)) as method:
        for number in (10, 1_000_000):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await method(str(number).encode())
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            details = error.value.details() or ""
            assert details.startswith("there is no worker " + 10 * letter)
            assert details.endswith("…") == (number > 10)


async def test_a_request_of_too_many_fields_is_refused_before_it_is_parsed() -> None:
    """786,000 empty chat messages made 1.5 MB, and took 20 ms to be parsed and 3 to be freed."""

    async def count(request: pb.GenerateRequest, context: Any) -> bytes:
        return str(len(request.chat.messages)).encode()

    handler = grpc.unary_unary_rpc_method_handler(count, pb.GenerateRequest.FromString)
    async with serving(ErrorInterceptor(lambda: RequestLimits(1 << 20)), handler) as method:
        largest = pb.GenerateRequest(
            chat={"messages": [pb.ChatMessage(role="user", content="a")] * 4096},
            sampling={"logit_bias": dict.fromkeys(range(1024), 1.0), "allowed_token_ids": range(128_256)},
            resume={"outputs": [pb.ResumedOutput(index=index) for index in range(128)]},
        )
        assert await method(largest.SerializeToString()) == b"4096"
        many = pb.GenerateRequest(chat={"messages": [pb.ChatMessage()] * 400_000})
        with pytest.raises(grpc.aio.AioRpcError, match="has more than 6144 fields") as error:
            await method(many.SerializeToString())
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_that_is_too_large_only_until_the_limits_grow_may_be_sent_again() -> None:
    async def find(request: pb.GenerateRequest, context: Any) -> bytes:
        return request.text.encode()[:1]

    handler = grpc.unary_unary_rpc_method_handler(find, pb.GenerateRequest.FromString)
    limits = RequestLimits(100, will_grow="until the model is known")
    data = pb.GenerateRequest(text="a" * 200).SerializeToString()
    async with serving(ErrorInterceptor(lambda: limits), handler) as method:
        with pytest.raises(grpc.aio.AioRpcError, match="at most 100 are allowed here until") as error:
            await method(data)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        limits = RequestLimits(1000)
        assert await method(data) == b"a"


@pytest.mark.parametrize(
    "method",
    [
        "/pagewire.v1.InferenceService/Generate",
        "/grpc.health.v1.Health/Check",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_bytes_that_are_no_message_are_the_callers_mistake_whichever_library_serves_the_method(
    byte_tokenizer_directory: Path, method: str
) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with fake_worker(worker) as address, scheduler(address) as one, grpc.aio.insecure_channel(one.target) as to:
        error = await refused(to.unary_stream(method)(b"\xff"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "the request's bytes are not a valid message of this method"


async def test_so_are_those_in_a_stream_of_messages() -> None:
    async def read(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for _ in requests:
            yield b""

    handler = grpc.stream_stream_rpc_method_handler(read, pb.GenerateRequest.FromString)
    async with serving(ErrorInterceptor(), handler) as method:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await method(b"\xff")
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def with_an_unknown_field(message: Any) -> bytes:
    """Its bytes, and behind them a text in field 1023."""
    return bytes(message.SerializeToString()) + bytes([0xFA, 0x3F, 1, 65])


UNKNOWN = {
    "GenerateRequest": with_an_unknown_field(pb.GenerateRequest(text="a")),
    "SamplingParams": pb.GenerateRequest(text="a").SerializeToString()
    + bytes([pb.GenerateRequest.SAMPLING_FIELD_NUMBER << 3 | 2, 4, 0xFA, 0x3F, 1, 65]),
    "ChatMessage": pb.GenerateRequest(
        chat=pb.Chat.FromString(bytes([pb.Chat.MESSAGES_FIELD_NUMBER << 3 | 2, 4, 0xFA, 0x3F, 1, 65]))
    ).SerializeToString(),
}


@pytest.mark.parametrize("name", UNKNOWN)
async def test_a_field_that_the_server_does_not_know_is_refused_by_its_number(name: str) -> None:
    async with scheduler("127.0.0.1:1") as one, grpc.aio.insecure_channel(one.target) as channel:
        generate = channel.unary_stream("/pagewire.v1.InferenceService/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in generate(UNKNOWN[name]):
                pass
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"field 1023 of {name}" in (error.value.details() or "")
