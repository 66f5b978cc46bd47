"""A request costs one message to the engine, and a flood is refused before it is checked."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from engines import running, until
from fake_worker_service import FakeWorkerService, serving
from scheduler_in_process import scheduler

from pagewire.v1 import engine_service_pb2 as pb
from pagewire.v1 import inference_service_pb2 as inference
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_common.calls.errors import RequestError
from pagewire_common.images.layout import ImageLayouts
from pagewire_common.sounds.families import MAX_SAMPLES, voxtral_layout
from scheduler_service.engine.front_ends.servicer import FrontEndConnection
from scheduler_service.frontend.calls import generation
from scheduler_service.frontend.link import engine_link
from scheduler_service.frontend.link.engine_call import EngineCall
from scheduler_service.frontend.link.engine_link import Admissions
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request import GenerationRequest
from scheduler_service.wire.sampling import RequestSampling

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def request(name: str) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=[5], sampling=RequestSampling(max_tokens=5))


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[list[str | None]]:
    """The names of the events of each message that the engine reads."""
    found: list[list[str | None]] = []
    read = FrontEndConnection.read

    async def noted(sent: AsyncIterator[pb.AttachRequest]) -> AsyncIterator[pb.AttachRequest]:
        async for message in sent:
            found.append([event.WhichOneof("event") for event in message.events])
            yield message

    monkeypatch.setattr(FrontEndConnection, "read", lambda self, sent: read(self, noted(sent)))
    return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The engine reads messages while the event is set."""
    reads, read = asyncio.Event(), FrontEndConnection.read

    async def stopped(sent: AsyncIterator[pb.AttachRequest]) -> AsyncIterator[pb.AttachRequest]:
        async for message in sent:
            await reads.wait()
            yield message

    monkeypatch.setattr(FrontEndConnection, "read", lambda self, sent: read(self, stopped(sent)))
    reads.set()
    return reads


async def test_a_request_is_admitted_and_queued_by_one_message(
    messages: list[list[str | None]], byte_tokenizer_directory: Path
) -> None:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as worker, running(worker) as one:
        model = await one.model()
        with EngineCall(one.link) as call:
            await call.admit_early("a", 10)
            await call.submit(request("a"), model)
            assert ["admit", "submit"] in messages
            assert one.link.admissions.num_bytes == 0


async def test_a_refused_request_is_not_queued_and_the_next_is_refused_before_its_check(
    byte_tokenizer_directory: Path,
) -> None:
    async with (
        serving(FakeWorkerService(byte_tokenizer_directory)) as worker,
        running(worker, max_num_requests=1) as one,
    ):
        model = await one.model()
        with EngineCall(one.link) as held:
            await held.admit("held", 10)
            with EngineCall(one.link) as call:
                await call.admit_early("a", 10)  # as the last answer was no refusal
                with pytest.raises(RequestError, match="1 requests are in flight") as refused:
                    await call.submit(request("a"), model)
                assert refused.value.code is EXHAUSTED
            assert not one.engine.requests.in_flight
            with EngineCall(one.link) as call, pytest.raises(RequestError, match="1 requests are in flight"):
                await call.admit_early("a", 10)
        await until(lambda: not one.engine.requests.admission.being_checked)
        with EngineCall(one.link) as call:
            await call.admit_early("a", 10)
            assert one.link.admissions.num_bytes == 0  # it has waited for the answer
            await call.submit(request("a"), model)
        await until(lambda: one.engine.requests.admission.num_bytes == 0)


async def test_a_call_that_ends_unanswered_leaves_nothing(byte_tokenizer_directory: Path) -> None:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as worker, running(worker) as one:
        await one.model()
        with EngineCall(one.link) as call:
            await call.admit_early("a", 10)
            assert one.link.admissions.num_bytes == 10
        await until(lambda: one.link.admissions.num_bytes == 0)
        await until(lambda: not one.link.connection._questions)
        await until(lambda: not one.engine.requests.admission.being_checked)


async def test_a_refusal_that_came_during_the_check_ends_the_call_before_its_submission(
    messages: list[list[str | None]], byte_tokenizer_directory: Path
) -> None:
    async with (
        serving(FakeWorkerService(byte_tokenizer_directory)) as worker,
        running(worker, max_num_requests=1) as one,
    ):
        model = await one.model()
        with EngineCall(one.link) as held, EngineCall(one.link) as call:
            await held.admit("held", 10)
            await call.admit_early("a", 10)
            await until(lambda: one.link.admissions.num_bytes == 0)
            with pytest.raises(RequestError, match="1 requests are in flight"):
                await call.submit(request("a"), model)
        await until(lambda: not one.engine.requests.admission.being_checked)
        assert not any("submit" in events for events in messages)


@pytest.mark.parametrize("flood", ["same id", "side calls between", "resumptions between"])
async def test_a_flood_of_refused_requests_is_not_checked(
    flood: str, byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, checked = generation.check_request, list[str]()

    async def noted(
        message: inference.GenerateRequest, request_id: str, model: ServedModel, output: generation.ChatOutput
    ) -> GenerationRequest:
        checked.append(request_id)
        return await check(message, request_id, model, output)

    monkeypatch.setattr(generation, "check_request", noted)
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.runs.clear()
    max_num_requests = 9 if flood == "same id" else 1
    async with (
        serving(worker) as address,
        scheduler(address, max_num_requests=max_num_requests) as one,
        grpc.aio.insecure_channel(one.target) as channel,
    ):
        await one.link.model()
        stub = InferenceServiceStub(channel)

        def generate(name: str, *, resumes: bool = False) -> Any:
            resume = inference.ResumeState() if resumes else None
            return stub.Generate(inference.GenerateRequest(request_id=name, text="a", resume=resume))

        streams = [generate("held")]
        await until(lambda: "held" in one.engine.requests.in_flight)
        checked.clear()
        refused = "held" if flood == "same id" else "refused"
        for _ in range(5):
            with pytest.raises(grpc.aio.AioRpcError, match="in flight"):
                await generate(refused).read()
            if flood == "side calls between":
                await stub.GetModel(inference.GetModelRequest())
            if flood == "resumptions between":
                streams.append(generate("held", resumes=True))
                with pytest.raises(grpc.aio.AioRpcError, match="goes on with"):
                    await streams[-2].read()
        assert checked.count(refused) == 1
        for stream in streams:
            stream.cancel()


async def test_a_call_that_is_over_counts_until_the_engine_answers(
    reads: asyncio.Event, byte_tokenizer_directory: Path
) -> None:
    """While the engine reads nothing, the submissions of cancelled calls are still queued."""
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as worker, running(worker) as one:
        model = await one.model()
        reads.clear()
        for number in range(3):
            with EngineCall(one.link) as call:
                await call.admit_early(f"{number}", 10)
                submitted = asyncio.create_task(call.submit(request(f"{number}"), model))
                await asyncio.sleep(0)
                submitted.cancel()
                await asyncio.wait([submitted])
        assert one.link.admissions.num_bytes == 30
        reads.set()
        await until(lambda: one.link.admissions.num_bytes == 0)
        await until(lambda: one.engine.requests.admission.num_bytes == 0)


async def test_small_sounds_that_wait_for_their_admission_count_as_small(
    reads: asyncio.Event, byte_tokenizer_directory: Path
) -> None:
    """Their samples and features take memory only after the engine has counted it."""
    async with (
        serving(FakeWorkerService(byte_tokenizer_directory)) as worker,
        scheduler(worker) as one,
        grpc.aio.insecure_channel(one.target) as channel,
    ):
        layouts = ImageLayouts("fake", 5, 5, partial(voxtral_layout, 5, 5), max_samples=MAX_SAMPLES)
        one.link.loading.model = replace(await one.link.model(), sounds=layouts)
        reads.clear()
        stub = InferenceServiceStub(channel)
        sound = inference.Sound(data=b"sound", content_type="audio/wav")
        transcribed = [stub.Transcribe(inference.TranscribeRequest(sound=sound)) for _ in range(20)]
        generated = [
            stub.Generate(inference.GenerateRequest(token_ids={"ids": [5]}, encoder_sound=sound)) for _ in range(20)
        ]
        part = inference.PromptPart(sound=sound)
        prompted = [stub.Generate(inference.GenerateRequest(parts={"parts": [part]})) for _ in range(4)]
        await until(lambda: len(one.link.connection._questions) == 44 or any(call.done() for call in prompted))
        assert one.link.admissions.num_bytes < 44 * (64 << 10)
        reads.set()
        codes = {await call.code() for call in (*transcribed, *generated, *prompted)}
        assert codes == {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT}


async def test_only_the_refused_api_key_waits_for_answers_and_only_for_some_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admitted, loop = Admissions(), asyncio.get_running_loop()
    for key, code in (("flood", EXHAUSTED.value[0]), ("calm", 0), ("flood", 0)):
        answer: asyncio.Future[pb.Answer] = loop.create_future()
        admitted.count(key, 7, answer)
        assert admitted.num_bytes == 7
        answer.set_result(pb.Answer(code=code))
        await asyncio.sleep(0)
    assert admitted.must_wait("flood")
    assert not admitted.must_wait("calm")
    assert admitted.num_bytes == 0
    monkeypatch.setattr(engine_link, "WAIT_SECONDS", 0.0)
    assert not admitted.must_wait("flood")


async def test_a_call_without_a_model_hears_of_its_refusal_before_there_is_one() -> None:
    async with running("127.0.0.1:1", max_num_requests=1, no_worker_timeout=50) as one:
        with EngineCall(one.link) as held, EngineCall(one.link) as call:
            await held.admit_early("held", 10)
            with pytest.raises(RequestError, match="1 requests are in flight"):
                await call.admit_early("a", 10)


async def test_a_call_of_which_the_engine_never_heard_is_not_closed_there(
    reads: asyncio.Event, messages: list[list[str | None]], byte_tokenizer_directory: Path
) -> None:
    """While the engine reads nothing, refused calls must not fill the queue to it."""
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as worker, running(worker) as one:
        await one.model()
        reads.clear()
        with EngineCall(one.link) as waiting:
            await waiting.admit_early("a", 1 << 30)
            await until(lambda: not one.link.connection._events)
            for _ in range(3):
                with EngineCall(one.link) as call, pytest.raises(RequestError, match="wait to be admitted"):
                    await call.admit_early("b", 10)
            assert not one.link.connection._events
        reads.set()
        await until(lambda: ["close"] in messages)
