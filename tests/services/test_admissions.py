"""A request costs one message to the engine, and a flood is refused before it is checked."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from engines import running, until
from fake_worker_service import FakeWorkerService, serving

from pagewire.v1 import engine_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.engine.front_ends.servicer import FrontEndConnection
from scheduler_service.frontend.link.admissions import Admissions
from scheduler_service.frontend.link.engine_call import EngineCall
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
            assert not one.link.admissions.must_wait("")
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


async def test_only_the_refused_api_key_waits_for_answers() -> None:
    admissions, loop = Admissions(), asyncio.get_running_loop()
    for key, code in (("flood", EXHAUSTED.value[0]), ("calm", grpc.StatusCode.ALREADY_EXISTS.value[0])):
        answer: asyncio.Future[pb.Answer] = loop.create_future()
        admissions.count(pb.Admit(num_bytes=7, api_key_id=key), answer)
        assert admissions.num_bytes == 7
        answer.set_result(pb.Answer(code=code))
        await asyncio.sleep(0)
    assert admissions.must_wait("flood")
    assert not admissions.must_wait("calm")
    assert admissions.num_bytes == 0


async def test_a_call_without_a_model_hears_of_its_refusal_before_there_is_one() -> None:
    async with running("127.0.0.1:1", max_num_requests=1, no_worker_timeout=50) as one:
        with EngineCall(one.link) as held, EngineCall(one.link) as call:
            await held.admit_early("held", 10)
            with pytest.raises(RequestError, match="1 requests are in flight"):
                await call.admit_early("a", 10)
