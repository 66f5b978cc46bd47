"""What a client can make large is counted in bytes, and refused before it fills the memory."""

import asyncio
import random
import sys
import tracemalloc
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from engines import running, submit, text_of, until
from fake_worker_service import FakeWorkerService, serving
from scheduler_in_process import InProcess, scheduler

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client, SamplingParams
from pagewire_client.llm import collect
from pagewire_common.calls.errors import RequestError
from scheduler_service.core import SamplingParams as CoreSamplingParams
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.frontend.link.engine_call import EngineCall
from scheduler_service.frontend.link.engine_link import MIN_BYTES, UNREAD_SHARE
from scheduler_service.frontend.output.request import GenerationRequest
from scheduler_service.frontend.output.request_memory import UnreadOutput, request_bytes
from scheduler_service.frontend.output.streams import OutputDelta, OutputStream, Turns
from scheduler_service.wire.messages import KEY_BYTES

MIB = 1 << 20
LIMIT = 4  # MiB


@pytest.fixture
async def one(byte_tokenizer_directory: Path) -> AsyncIterator[InProcess]:
    """A scheduler in front of a worker that answers nothing yet, so that all requests stay in flight."""
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.runs.clear()
    async with serving(worker) as address, scheduler(address, request_memory=LIMIT / 1024) as one:
        yield one
        worker.runs.set()


def message(num_tokens: int = 1, *, text: str = "", **sampling: object) -> pb.GenerateRequest:
    prompt = pb.TokenIds(ids=[2**32 - 1] * num_tokens)
    parameters = pb.SamplingParams(**sampling)  # type: ignore[arg-type]
    if text:
        return pb.GenerateRequest(text=text, sampling=parameters)
    return pb.GenerateRequest(token_ids=prompt, sampling=parameters)


async def stay(client: Client, request_id: str) -> None:
    async for _ in client.generate([5], SamplingParams(max_tokens=2, n=16), request_id=request_id):
        pass


@pytest.mark.parametrize(
    ("large", "least"),
    [
        (message(100_000), 100_000 * (5 + 8 + 4)),
        (message(text="x" * 100_000), 100_000 * (2 + 4)),
        (message(n=128), 128 * 4096),
        (message(beam_width=128), 128 * 4096),
        (message(n=1, best_of=128), 128 * 4096),
        (message(allowed_token_ids=[2**21 - 1] * 100_000), 100_000 * (3 + 8 + 4)),
        (message(logit_bias=dict.fromkeys(range(1024), 1.0)), 1024 * 100),
        (message(bad_words=["x" * 256] * 64), 64 * 256 * 6),
        (message(json_schema="x" * 60_000), 60_000 * 6),
        (message(choice={"options": ["x" * 60] * 1000}), 60_000 * 6),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(content="x" * 1000)] * 100)), 100_000 * 6),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(fields="x" * 1000)] * 100)), 100_000 * 6),
        (pb.GenerateRequest(chat=pb.Chat(tools="x" * 50_000, documents="x" * 50_000)), 100_000 * 6),
        (pb.GenerateRequest(resume=pb.ResumeState(outputs=[pb.ResumedOutput(token_ids=[7] * 9000)])), 9000 * 13),
    ],
    ids=[
        "prompt",
        "text",
        "n",
        "beams",
        "best_of",
        "allowed",
        "biases",
        "bad words",
        "schema",
        "choice",
        "chat",
        "fields of messages",
        "tools",
        "resumed",
    ],
)
def test_whatever_makes_a_request_large_counts(large: pb.GenerateRequest, least: int) -> None:
    assert request_bytes(large) - request_bytes(message()) >= least * 0.99


def test_a_request_counts_more_than_its_numbers_take() -> None:
    large = message(100_000)
    packed = array("I", large.token_ids.ids).tobytes()
    in_front_end = len(large.SerializeToString()) + 8 * 100_000 + 2 * len(packed)  # one of them on its way
    in_engine = len(packed) + 100_000 // 16 * sys.getsizeof(bytes(KEY_BYTES))
    held = in_front_end + in_engine
    assert held < request_bytes(large) < 2 * held


async def test_a_call_that_ends_before_its_output_is_read_gives_its_bytes_back(one: InProcess) -> None:
    """As one that is cancelled in the turn in which its submission is answered."""
    request = GenerationRequest(request_id="a", prompt_token_ids=[5], sampling=CoreSamplingParams(max_tokens=5))
    with EngineCall(one.link) as call:
        await call.admit("a", 0)
        state = await call.submit(request, await one.link.model())
        state.stream.put_token(0, 70, "g", 1)
        assert one.link.requests.unread.num_bytes
    assert one.link.requests.unread.num_bytes == 0
    await until(lambda: not one.engine.requests.in_flight)


async def test_calls_that_the_engine_has_not_admitted_are_bounded_too(one: InProcess) -> None:
    one.link.connection.say = lambda *_, **__: None  # type: ignore[method-assign]  # the engine hears of nothing
    most = max(MIN_BYTES, one.link.requests.unread.most // UNREAD_SHARE)
    with EngineCall(one.link) as first, EngineCall(one.link) as second:
        waiting = asyncio.create_task(first.admit("a", 10 * most))  # the only one may be as large as it likes
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="wait to be admitted"):
            await second.admit("b", 1)
        waiting.cancel()
        await asyncio.wait([waiting])
    with EngineCall(one.link) as third, pytest.raises(RequestError, match="wait to be admitted"):
        await third.admit("c", 1)  # the events of the first may still be queued


async def test_what_a_message_hides_counts(one: InProcess) -> None:
    """Of a field that comes twice protobuf shows the last one, and keeps both."""
    seen = pb.GenerateRequest(token_ids={"ids": [5]})
    hidden = pb.GenerateRequest(text="x" * (MIB - 100)).SerializeToString() + seen.SerializeToString()
    assert pb.GenerateRequest.FromString(hidden) == seen
    async with grpc.aio.insecure_channel(one.target) as channel:
        call = channel.unary_stream("/pagewire.v1.InferenceService/Generate")(hidden)
        await until(lambda: bool(one.engine.requests.in_flight))
        assert one.engine.requests.admission.num_bytes > 2 * len(hidden)
        call.cancel()
        await until(lambda: not one.engine.requests.admission.num_bytes)


async def test_requests_beyond_the_memory_are_refused_and_taken_when_others_have_left(one: InProcess) -> None:
    async with Client(one.target) as client:
        calls = [asyncio.create_task(stay(client, str(number))) for number in range(60)]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await next(asyncio.as_completed(calls))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--request-memory allows all together 4.0 MiB, of which requests in flight hold" in error.value.details()
        await until(lambda: sum(call.done() for call in calls) + len(one.engine.requests.in_flight) == 60)
        assert 0.9 * LIMIT * MIB < one.engine.requests.admission.num_bytes <= LIMIT * MIB
        left = next(call for call in calls if not call.done())
        left.cancel()
        await until(lambda: one.engine.requests.admission.num_bytes < 0.99 * LIMIT * MIB)
        again = asyncio.create_task(stay(client, "again"))
        await until(lambda: "again" in one.engine.requests.in_flight)
        for call in (*calls, again):
            call.cancel()
        await asyncio.gather(*calls, again, return_exceptions=True)
        await until(lambda: not one.engine.requests.in_flight)
    assert one.engine.requests.admission.num_bytes == 0


async def test_a_request_that_there_is_never_room_for_is_invalid(one: InProcess) -> None:
    async with Client(one.target) as client:
        with pytest.raises(grpc.aio.AioRpcError, match=r"send a smaller one") as error:
            await collect(client, [5] * 300_000)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert one.engine.requests.admission.num_bytes == 0


async def test_a_request_that_is_refused_for_something_else_holds_no_memory(one: InProcess) -> None:
    async with Client(one.target) as client:
        with pytest.raises(grpc.aio.AioRpcError, match="the vocabulary has"):
            await collect(client, [1_000_000])
    await until(lambda: not one.engine.requests.admission.num_bytes)


async def test_outputs_that_no_model_gives_are_refused_by_their_name_and_hold_no_memory(one: InProcess) -> None:
    async with Client(one.target) as client:
        for name in ("n", "best_of", "beam_width"):
            with pytest.raises(
                grpc.aio.AioRpcError, match=f"sampling.{name} is 100000; it must be at most 128"
            ) as error:
                await collect(client, [5], SamplingParams(**{name: 100_000}))  # type: ignore[arg-type]
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert one.engine.requests.admission.num_bytes == 0


async def test_log_probabilities_of_a_prompt_count_because_their_client_may_read_slowly(one: InProcess) -> None:
    async with Client(one.target) as client:
        parameters = SamplingParams(max_tokens=1, prompt_logprobs=20)
        calls = [asyncio.create_task(collect(client, [5] * 500, parameters)) for _ in range(6)]
        with pytest.raises(grpc.aio.AioRpcError, match=r"this request takes 0\.9 MiB of memory") as error:
            await next(asyncio.as_completed(calls))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: len(one.engine.requests.in_flight) == 4)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await until(
            lambda: not (one.engine.requests.in_flight or one.engine.requests.admission.num_bytes)
        )  # also of one being checked


async def test_a_stream_that_another_call_goes_on_with_counts_until_it_is_closed(
    byte_tokenizer_directory: Path,
) -> None:
    """Its client may have left a message unread, and break and resume as often as it likes."""
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, running(address) as engine:
        sampling = CoreSamplingParams(max_tokens=5)
        request = GenerationRequest(request_id="r", prompt_token_ids=[5], sampling=sampling, resumes=True)
        streams, calls = [], []
        for number in range(3):
            streams.append(await engine.submit(request, 1000))
            calls.append(engine.requests.in_flight["r"])
            assert engine.requests.admission.num_bytes == 1000 * (number + 1)
        assert list(engine.requests.in_flight) == ["r"]
        for state, call in zip(streams, calls, strict=True):
            await engine.close(state)
            await until(lambda call=call: not call.num_bytes)
            engine.engine.close(call)
        assert engine.requests.admission.num_bytes == 0


@pytest.mark.parametrize("num_logprobs", [0, 1, 21])
async def test_output_that_is_not_read_counts_what_it_takes(num_logprobs: int) -> None:
    unread, numbers = UnreadOutput(1 << 30), random.Random(0)
    stream = OutputStream(1, Turns(), unread)
    tracemalloc.start()
    for number in range(5000):
        token_id = numbers.randrange(1000, 1 << 17)
        if not num_logprobs:
            stream.put_token(0, token_id, " the", number)
            continue
        token_ids = numbers.sample(range(1000, 1 << 17), num_logprobs)
        entry = TokenLogprobs(token_ids, [-numbers.random() for _ in token_ids][:], 1000 + number)
        stream.put(OutputDelta(0, " the", [token_id], [entry], num_output_tokens=number))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held <= unread.num_bytes <= 1.4 * held
    stream.leave()
    assert unread.num_bytes == 0


async def test_output_counts_as_unread_until_its_reader_asks_for_more() -> None:
    unread = UnreadOutput(1 << 30)
    stream = OutputStream(1, Turns(), unread)
    stream.put_token(0, 5, "text", 1)
    delta = await anext(stream)
    stream.put_token(0, 5, "", 2)
    assert unread.num_bytes == stream.num_unread > delta.num_bytes > 0
    delta = await anext(stream)
    assert unread.num_bytes == stream.num_unread == delta.num_bytes > 0


async def test_of_all_requests_the_one_with_the_most_unread_output_ends_when_together_they_have_too_much(
    byte_tokenizer_directory: Path,
) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory, num_device_blocks=1100)
    async with serving(worker) as address, running(address, request_memory=1 / 1024) as engine:
        most = 0

        def note(answer: object) -> object:
            nonlocal most
            most = max(most, engine.link.requests.unread.num_bytes)
            return answer

        worker.spoil = note
        unread = await submit(engine, "unread", [5], n=14, max_tokens=480)
        late = await submit(engine, "late", [5], max_tokens=480)
        read = await submit(engine, "read", [5], max_tokens=480)
        assert len(await text_of(engine, read)) == 480
        assert len(await text_of(engine, late)) == 480
        assert 0.9 * MIB / 4 < most <= MIB / 4
        assert engine.link.requests.unread.num_bytes == 0
        with pytest.raises(RequestError, match=r"0\.2 MiB of output that its client has not read, or") as error:
            await anext(unread.stream)
        assert error.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await engine.close(unread)
