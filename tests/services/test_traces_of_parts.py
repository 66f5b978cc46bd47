"""Spans of calls that are cut into parts, and of calls over HTTP: whose trace they are in, and what they are called."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from embedding_helpers import encoder_settings, serving
from engines import until
from fake_worker_service import FakeWorkerService
from fake_worker_service import serving as serving_fake
from http_edge import http_edge
from opentelemetry.sdk.trace import ReadableSpan
from scheduler_in_process import InProcess, scheduler
from sounds import wav
from spans import CALLER, TRACE, Memory, caller
from structlog.testing import capture_logs
from tiny_encoder import write_encoder
from tiny_encoder_decoder import write_whisper

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import Client
from pagewire_client.channel import connect
from scheduler_service.frontend.output.request_trace import MAX_REQUESTS

SECRET = "what no span may tell"
HEADERS = {"traceparent": caller()[0][1]}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("models") / "encoder")


@pytest.fixture
async def traced(encoder: Path) -> AsyncIterator[tuple[InProcess, Memory]]:
    async with serving(encoder, **encoder_settings()) as (one, _):
        memory = Memory()
        one.link.tracer = memory.tracer
        yield one, memory
        await until(lambda: not one.engine.requests.traced)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_call_of_texts_has_a_span_in_its_callers_trace_and_one_for_each_phase_of_a_text(
    traced: tuple[InProcess, Memory],
) -> None:
    one, memory = traced
    request = pb.EmbedRequest(inputs=[pb.EmbedInput(text=SECRET), pb.EmbedInput(text="b")])
    with capture_logs() as logs:
        async with connect(one.target) as channel:
            call = InferenceServiceStub(channel).Embed(request, metadata=caller())
            num_tokens = sum([message.usage.prompt_tokens async for message in call])
        await until(lambda: len(memory.spans) == 5)
    *phases, whole = memory.spans
    assert whole.name == "embeddings encoder"
    assert whole.parent is not None
    assert (f"{whole.context.trace_id:032x}", f"{whole.parent.span_id:016x}") == (TRACE, CALLER)
    assert attributes(whole)["gen_ai.operation.name"] == "embeddings"
    assert attributes(whole)["gen_ai.request.model"] == "encoder"
    assert attributes(whole)["gen_ai.usage.input_tokens"] == num_tokens
    assert attributes(whole)["pagewire.num_texts"] == 2
    names = sorted((attributes(span)["pagewire.part"], span.start_time or 0, span.name) for span in phases)
    assert [(part, name) for part, _, name in names] == [(part, of) for part in (0, 1) for of in ("queue", "prefill")]
    assert {span.parent.span_id for span in phases if span.parent} == {whole.context.span_id}
    assert all((whole.start_time or 0) <= (span.start_time or 0) for span in phases)
    (line,) = [log for log in logs if log["event"] == "texts closed"]
    assert line["trace_id"] == TRACE
    assert attributes(whole)["gen_ai.response.id"] == line["request_id"]
    assert SECRET not in "".join(span.to_json() for span in memory.spans)


async def test_of_a_call_of_many_texts_the_first_ones_have_spans(traced: tuple[InProcess, Memory]) -> None:
    one, memory = traced
    async with Client(one.target) as client:
        await client.embed(["a"] * (3 * MAX_REQUESTS))
    await until(lambda: memory.names[-1:] == ["embeddings encoder"])
    assert {attributes(span)["pagewire.part"] for span in memory.spans[:-1]} == {*range(MAX_REQUESTS)}


async def test_a_refused_call_of_texts_has_a_span_that_says_why(traced: tuple[InProcess, Memory]) -> None:
    one, memory = traced
    async with connect(one.target) as channel:
        with pytest.raises(Exception, match="documents is empty"):
            await InferenceServiceStub(channel).Score(pb.ScoreRequest(query="a"), metadata=caller())
    await until(lambda: memory.spans)
    (whole,) = memory.spans
    assert (whole.name, attributes(whole)["error.type"]) == ("score", "INVALID_ARGUMENT")
    assert whole.parent is not None


async def test_the_log_has_the_callers_trace_where_no_spans_are_made(traced: tuple[InProcess, Memory]) -> None:
    one, memory = traced
    one.link.tracer = None
    with capture_logs() as logs:
        async with connect(one.target) as channel:
            request = pb.ScoreRequest(query="a", documents=["b"])
            await InferenceServiceStub(channel).Score(request, metadata=caller())
        await until(lambda: any(log["event"] == "texts closed" for log in logs))
    assert [log["trace_id"] for log in logs if log["event"] == "texts closed"] == [TRACE]
    assert not memory.spans


async def test_a_transcription_has_the_spans_of_its_windows(tmp_path: Path) -> None:
    memory = Memory()
    async with serving(write_whisper(tmp_path / "whisper"), block_size=16, num_gpu_blocks_override=400) as (one, _):
        one.link.tracer = memory.tracer
        with capture_logs() as logs:
            async with connect(one.target) as channel:
                request = pb.TranscribeRequest(sound=pb.Sound(data=wav(2), content_type="audio/wav"), language="de")
                async for _ in InferenceServiceStub(channel).Transcribe(request, metadata=caller()):
                    pass
            await until(lambda: memory.names[-1:] == ["transcription whisper"])
        await until(lambda: not one.engine.requests.traced)
    *phases, whole = memory.spans
    assert {span.name for span in phases} == {"queue", "prefill", "decode"}
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert attributes(whole)["gen_ai.operation.name"] == "transcription"
    assert attributes(whole)["gen_ai.usage.output_tokens"] > 0
    assert [log["trace_id"] for log in logs if log["event"] == "transcription closed"] == [TRACE]


# ---- over HTTP


async def post(url: str, path: str, body: Any) -> None:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body, headers=HEADERS) as answer:
        assert answer.status == 200, await answer.text()


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/embeddings", {"input": "a"}, "embeddings encoder"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "score encoder"),
    ],
)
async def test_a_header_of_http_has_calls_of_texts_in_the_callers_trace(
    path: str, body: Any, name: str, traced: tuple[InProcess, Memory]
) -> None:
    one, memory = traced
    async with http_edge(one.link) as url:
        await post(url, path, {"model": "encoder"} | body)
    await until(lambda: memory.names[-1:] == [name])
    assert f"{memory.spans[-1].context.trace_id:032x}" == TRACE


async def test_over_http_a_chat_is_a_chat_and_a_text_is_a_text_in_the_callers_trace(
    byte_tokenizer_directory: Path,
) -> None:
    memory = Memory()
    async with serving_fake(FakeWorkerService(byte_tokenizer_directory)) as address, scheduler(address) as one:
        await one.link.model()
        one.link.tracer = memory.tracer
        async with http_edge(one.link) as url:
            chat = {"messages": [{"role": "user", "content": SECRET}]}
            for path, body in (("chat/completions", chat), ("completions", {"prompt": SECRET})):
                await post(url, f"/v1/{path}", {"model": "fake", "max_tokens": 3} | body)
        await until(lambda: len([name for name in memory.names if name.endswith(" fake")]) == 2)
    wholes = [span for span in memory.spans if span.name.endswith(" fake")]
    assert [attributes(span)["gen_ai.operation.name"] for span in wholes] == ["chat", "text_completion"]
    assert {f"{span.context.trace_id:032x}" for span in wholes} == {TRACE}
    assert SECRET not in "".join(span.to_json() for span in memory.spans)
