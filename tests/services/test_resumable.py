"""The client against a server that breaks every stream where it is told to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from pagewire_client import Client, SamplingParams
from pagewire_client.llm import Completion, collect
from pagewire_client.retry import Backoff

SEED = 77
MODEL = "the model"
MAX_TOKENS = 4


def token(index: int, position: int) -> int:
    return 100 * index + position


HANGS = None


class BreakingServer(InferenceServiceServicer):
    """Ends its first calls with these codes after so many messages; later calls are served to the end."""

    def __init__(self, *breaks: tuple[int, grpc.StatusCode | None]) -> None:
        self.breaks = list(breaks)
        self.calls: list[pb.GenerateRequest] = []
        self.called = asyncio.Event()
        self.left = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        self.calls.append(request)
        self.called.set()
        length, code = self.breaks.pop(0) if self.breaks else (None, grpc.StatusCode.OK)
        for message in self._messages(request)[:length]:
            yield message
        if code is HANGS:
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        elif code is not grpc.StatusCode.OK:
            await context.abort(code, "broken")

    def _messages(self, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        have = {output.index: output for output in request.resume.outputs}
        assert all(list(o.token_ids) == [token(i, p) for p in range(len(o.token_ids))] for i, o in have.items())
        if any(output.token_ids for output in have.values()):
            assert (request.resume.seed, request.resume.model_fingerprint) == (SEED, MODEL)
        messages = [
            pb.GenerateResponse(
                index=0, prompt_logprobs=[pb.TokenLogprobs()] * (3 - request.resume.num_prompt_logprobs)
            )
        ]
        messages += [
            pb.GenerateResponse(index=index, token_ids=[token(index, position)], text=f"{token(index, position)} ")
            for position in range(MAX_TOKENS)
            for index in range(request.sampling.n or 1)
            if index not in have or (not have[index].finished and position >= len(have[index].token_ids))
        ]
        for message in messages:
            message.seed, message.model_fingerprint = SEED, MODEL
            if message.token_ids == [token(message.index, MAX_TOKENS - 1)]:
                message.finish_reason = pb.FINISH_REASON_LENGTH
        return [message for message in messages if message.token_ids or message.prompt_logprobs]

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:  # noqa: N802
        return pb.AbortResponse(aborted=False)

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:  # noqa: N802
        if self.breaks:
            await context.abort(self.breaks.pop()[1], "broken")
        return pb.GetModelResponse(name="served")


@asynccontextmanager
async def serving(servicer: BreakingServer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


def assert_whole(completion: Completion, n: int) -> None:
    for index, output in enumerate(completion.outputs):
        assert output.token_ids == [token(index, position) for position in range(MAX_TOKENS)]
        assert output.text == "".join(f"{token_id} " for token_id in output.token_ids)
        assert output.finish_reason == pb.FINISH_REASON_LENGTH
    assert len(completion.outputs) == n
    assert len(completion.prompt_logprobs) == 3


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
@pytest.mark.parametrize("length", range(1 + 2 * MAX_TOKENS + 1))
async def test_no_token_is_lost_or_comes_twice_wherever_the_stream_breaks(length: int, code: grpc.StatusCode) -> None:
    servicer = BreakingServer((length, code))
    async with serving(servicer) as target, Client(target) as client:
        assert_whole(await collect(client, "x", SamplingParams(n=2)), 2)
    assert len({call.request_id for call in servicer.calls}) == 1
    assert len(servicer.calls) == (1 if length == 1 + 2 * MAX_TOKENS else 2)  # it had everything


async def test_a_stream_that_breaks_again_and_again_is_mended_every_time() -> None:
    """After each message: a success in between gives the next attempt its full time."""
    servicer = BreakingServer(*[(1, grpc.StatusCode.UNAVAILABLE)] * 8)
    async with serving(servicer) as target, Client(target) as client:
        assert_whole(await collect(client, "x", SamplingParams(n=2)), 2)
    assert len(servicer.calls) == 9


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT]
)
async def test_other_errors_are_the_callers(code: grpc.StatusCode) -> None:
    servicer = BreakingServer((2, code))
    async with serving(servicer) as target, Client(target) as client:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(client, "x")
    assert error.value.code() is code
    assert len(servicer.calls) == 1


@pytest.mark.parametrize("taken", [grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_no_place_is_an_error_at_first_and_waited_for_by_a_resumed_request(taken: grpc.StatusCode) -> None:
    servicer = BreakingServer((0, taken))
    async with serving(servicer) as target, Client(target) as client:
        with pytest.raises(grpc.aio.AioRpcError, match="broken"):
            await collect(client, "x")
        servicer.breaks = [(2, grpc.StatusCode.UNAVAILABLE), (0, taken)]
        assert_whole(await collect(client, "x"), 1)


async def test_the_caller_says_for_how_long() -> None:
    servicer = BreakingServer(*[(0, grpc.StatusCode.UNAVAILABLE)] * 1000)
    async with serving(servicer) as target, Client(target, retry_for=0) as client:
        for seconds in (None, 0.0):
            with pytest.raises(grpc.aio.AioRpcError, match="broken"):
                await anext(client.generate("x", retry_for=seconds))
        assert len(servicer.calls) == 2
        with pytest.raises(grpc.aio.AioRpcError, match="broken"):
            await anext(client.generate("x", retry_for=0.2))
        assert len(servicer.calls) > 3


async def test_a_deadline_is_for_all_attempts_together() -> None:
    servicer = BreakingServer(*[(0, grpc.StatusCode.UNAVAILABLE)] * 1000)
    async with serving(servicer) as target, Client(target) as client:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await anext(client.generate("x", timeout=0.3))
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_caller_that_leaves_is_not_retried() -> None:
    servicer = BreakingServer(*[(0, grpc.StatusCode.UNAVAILABLE)] * 1000)
    async with serving(servicer) as target, Client(target) as client:
        reading = asyncio.create_task(collect(client, "x"))
        await servicer.called.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        num_calls, servicer.breaks = len(servicer.calls), []
        assert (await client.get_model()).name == "served"
        assert len(servicer.calls) == num_calls


async def test_an_aborted_stream_is_not_resumed() -> None:
    """Between two connections no server has it: it ends as an abort does. A cut stream ends in the same way."""
    servicer = BreakingServer((3, grpc.StatusCode.UNAVAILABLE), *[(0, grpc.StatusCode.UNAVAILABLE)] * 1000)
    async with serving(servicer) as target, Client(target) as client:
        messages = []
        async for message in client.generate("x", SamplingParams(n=2), request_id="mine"):
            messages.append(message)
            if len(messages) == 3:
                servicer.called.clear()
                aborting = asyncio.create_task(abort_when_called_again(client, servicer))
        assert await aborting
    assert [(message.index, message.finish_reason) for message in messages[-2:]] == [
        (0, pb.FINISH_REASON_ABORT),
        (1, pb.FINISH_REASON_ABORT),
    ]
    assert len(messages) == 5


async def test_a_stream_that_is_aborted_before_the_server_knows_of_it_ends_too() -> None:
    servicer = BreakingServer((0, HANGS))
    async with serving(servicer) as target, Client(target) as client:
        aborting = asyncio.create_task(abort_when_called_again(client, servicer))
        messages = [message async for message in client.generate("x", request_id="mine")]
        assert await aborting
        assert [(message.index, message.finish_reason) for message in messages] == [(0, pb.FINISH_REASON_ABORT)]
        assert not await client.abort("mine")  # it has ended


async def test_an_aborted_stream_ends_though_the_server_that_was_asked_knows_nothing_of_it() -> None:
    """A balancer may send Abort to another server than the stream's."""
    servicer = BreakingServer((3, HANGS))
    messages = []
    async with serving(servicer) as target, Client(target) as client:
        async for message in client.generate("x", request_id="mine"):
            messages.append(message)
            if len(messages) == 3:
                assert await client.abort("mine")
        assert not await client.abort("mine")  # it has ended
        await servicer.left.wait()  # and its own server knows
    assert [message.finish_reason for message in messages] == [0, 0, 0, pb.FINISH_REASON_ABORT]
    assert len(servicer.calls) == 1


class AbortedServer(BreakingServer):
    """Its only call, once it is aborted, ends with this code."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__()
        self.code = code
        self.aborted = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        self.calls.append(request)
        yield self._messages(request)[0]
        await self.aborted.wait()
        await context.abort(self.code, "broken")

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:  # noqa: N802
        self.aborted.set()
        return pb.AbortResponse(aborted=True)


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT])
async def test_an_error_that_is_not_retried_is_the_callers_even_after_an_abort(code: grpc.StatusCode) -> None:
    async with serving(AbortedServer(code)) as target, Client(target) as client:
        stream = client.generate("x", request_id="mine")
        await anext(stream)
        assert await client.abort("mine")
        with pytest.raises(grpc.aio.AioRpcError, match="broken") as error:
            await anext(stream)
    assert error.value.code() is code


async def test_a_server_that_is_gone_after_an_abort_is_no_error() -> None:
    servicer = AbortedServer(grpc.StatusCode.UNAVAILABLE)
    async with serving(servicer) as target, Client(target) as client:
        stream = client.generate("x", request_id="mine")
        await anext(stream)
        assert await client.abort("mine")
        assert [message.finish_reason async for message in stream] == [pb.FINISH_REASON_ABORT]
    assert len(servicer.calls) == 1


async def test_a_reader_that_is_cancelled_is_cancelled_even_if_the_stream_was_aborted() -> None:
    servicer = BreakingServer((0, HANGS))
    async with serving(servicer) as target, Client(target) as client:
        reading = asyncio.create_task(anext(client.generate("x", request_id="mine")))
        await servicer.called.wait()
        aborting = asyncio.create_task(client.abort("mine"))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await aborting


async def abort_when_called_again(client: Client, servicer: BreakingServer) -> bool:
    await servicer.called.wait()
    return await client.abort("mine")


async def test_calls_of_one_answer_are_tried_again_too() -> None:
    async with serving(BreakingServer((0, grpc.StatusCode.UNAVAILABLE))) as target, Client(target) as client:
        assert (await client.get_model()).name == "served"
    async with Client("127.0.0.1:1", retry_for=0) as client:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.get_model()
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


class HealthOfABalancer(health_pb2_grpc.HealthServicer):
    """No server behind it for so many calls; then one that serves."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[health_pb2.HealthCheckResponse]:  # noqa: N802
        if self.num_failures:
            self.num_failures -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no healthy upstream")
        yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        await asyncio.Event().wait()


async def test_a_balancer_without_a_server_is_asked_with_growing_pauses_until_one_serves() -> None:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthOfABalancer(3), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Client(f"127.0.0.1:{port}") as client:
        began = asyncio.get_running_loop().time()
        await client.wait_until_serving(60)
        assert asyncio.get_running_loop().time() - began >= 0.05 + 0.1 + 0.2  # the least that the pauses come to
    await server.stop(None)


def test_pauses_grow_vary_and_end_at_the_limit() -> None:
    now = 0.0
    backoff = Backoff(10.0, clock=lambda: now)
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone")
    pauses = []
    while now < 10.0:
        pauses.append(backoff.pause(error))
        now += pauses[-1]
    with pytest.raises(grpc.aio.AioRpcError):
        backoff.pause(error)
    assert now == pytest.approx(10.0)
    assert 0.05 <= pauses[0] <= 0.1
    assert max(pauses) <= 2.0
    assert len(pauses) < 20
    backoff.succeeded()
    assert backoff.pause(error) <= 0.1
