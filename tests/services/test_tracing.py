"""What a collector is told of requests: where each spent its time, on whichever workers it was."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import structlog
from cluster import halted, until_requests
from collector import Collector, FoundSpan, collector
from engines import until
from fake_worker_service import FakeWorkerService, serving
from ports import free_address
from scheduler_in_process import InProcess, scheduler
from spans import CALLER, TRACE, Memory, caller

from pagewire.v1 import engine_service_pb2 as engine_pb
from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import collect
from pagewire_common.telemetry.tracing import check_endpoint, trace_parent
from scheduler_service import core
from scheduler_service.frontend.output.request import GenerationRequest
from scheduler_service.frontend.output.request_trace import MAX_PHASES, TEXT_COMPLETION, CallTrace, RequestTrace
from scheduler_service.recording.replayer import Replayer

SECRET = "a secret that no span may tell"

# ---- phases


def trace_of(memory: Memory) -> tuple[CallTrace, RequestTrace]:
    call = CallTrace(memory.tracer, caller(), TEXT_COMPLETION)
    request = GenerationRequest(request_id="a", prompt_token_ids=[1], sampling=core.SamplingParams(max_tokens=9))
    trace = call.request()
    assert trace is not None
    trace.submitted(request, 1.0)
    return call, trace


def standing(at: float, *, runs: bool, recomputes: int = 0, swaps: int = 0, changes: int = 0) -> engine_pb.Standing:
    place = engine_pb.Place(at=at, runs=runs, worker=f"worker {changes}")
    return engine_pb.Standing(num_recomputes=recomputes, num_swaps=swaps, num_worker_changes=changes, place=place)


def test_phases_follow_each_other_without_a_gap() -> None:
    memory = Memory()
    call, trace = trace_of(memory)
    trace.stands(standing(2.0, runs=True))
    trace.stands(standing(2.1, runs=True))  # told twice
    trace.gained_token(3.0)
    trace.gained_token(3.5)
    trace.stands(standing(4.0, runs=False, swaps=1))
    trace.gained_token(4.1)  # of a step that was in flight
    trace.stands(standing(5.0, runs=True, swaps=1))
    trace.stands(standing(6.0, runs=False, swaps=1, recomputes=1))
    trace.stands(standing(7.0, runs=True, swaps=1, recomputes=1, changes=1))
    trace.gained_token(8.0)
    call.end("OK", "", {"output_tokens": [3, 4], "finish_reasons": ["length", "stop"]})
    *phases, whole = memory.spans
    names = ["queue", "prefill", "decode", "preemption", "decode", "move", "prefill", "decode"]
    assert [span.name for span in phases] == names
    starts = [(span.start_time or 0) / 1e9 for span in phases]
    assert [start - starts[0] for start in starts] == pytest.approx([0, 1, 2, 3, 4, 5, 6, 7], abs=1e-6)
    assert all(before.end_time == after.start_time for before, after in itertools.pairwise(phases))
    assert [dict(span.attributes or {}).get("pagewire.preemption") for span in phases if span.name[0] in "pm"] == [
        *(None, "swap", "recompute", None)
    ]
    assert phases[-1].attributes == {"pagewire.worker": "worker 1"}
    assert whole.parent is not None
    assert f"{whole.parent.span_id:016x}" == CALLER
    assert {span.parent.span_id for span in phases if span.parent} == {whole.context.span_id}
    assert dict(whole.attributes or {})["gen_ai.usage.output_tokens"] == 7


def test_a_request_that_is_preempted_and_taken_again_between_two_looks_has_its_preemption() -> None:
    memory = Memory()
    call, trace = trace_of(memory)
    trace.stands(standing(2.0, runs=True))
    trace.stands(standing(3.0, runs=True, recomputes=1))
    call.end("OK", "", {})
    assert memory.names[:-1] == ["queue", "prefill", "preemption", "prefill"]


def test_a_request_that_is_preempted_for_ever_has_not_spans_for_ever() -> None:
    memory = Memory()
    call, trace = trace_of(memory)
    for number in range(MAX_PHASES):
        trace.stands(standing(2.0 + 2 * number, runs=True, recomputes=number))
        trace.stands(standing(3.0 + 2 * number, runs=False, recomputes=number + 1))
    call.end("OK", "", {})
    assert len(memory.spans) == MAX_PHASES + 1


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://a:1", "http://", "http://a:1/v1/traces"])
def test_an_endpoint_is_a_url_of_a_host_and_a_port(endpoint: str) -> None:
    with pytest.raises(ValueError, match="is not http://HOST:PORT"):
        check_endpoint(endpoint)


def test_an_empty_endpoint_is_none() -> None:
    """As Compose gives it, unless it is set."""
    assert check_endpoint("") is None


# ---- calls


async def closed(one: InProcess) -> None:
    await until(lambda: not one.engine.requests.in_flight and not one.engine.requests.traced)


async def test_a_request_whose_worker_is_lost_has_moved(byte_tokenizer_directory: Path, tmp_path: Path) -> None:
    """And a recording of it, which has no traces, comes out the same."""
    recording = tmp_path / "recording"
    memory, workers = Memory(), [FakeWorkerService(byte_tokenizer_directory) for _ in range(2)]
    async with (
        serving(workers[0]) as first,
        serving(workers[1]) as second,
        scheduler(first, second, record=recording) as one,
    ):
        one.link.tracer = memory.tracer
        await one.engine.model()
        await until(lambda: len(one.engine.workers.serving) == 2)
        async with Client(one.target) as client:
            stream = client.generate([5] * 20, SamplingParams(max_tokens=60, ignore_eos=True))
            await anext(stream)
            (lost,) = [worker for worker in workers if worker.num_prompts]
            lost.spoil = lambda _: b"no message"
            async for _ in stream:
                pass
        await closed(one)
    assert "answer" in [moment.kind for moment in Replayer().run(recording)]
    assert memory.names == ["queue", "prefill", "decode", "move", "prefill", "decode", "text_completion fake"]
    one_place, other = (first, second) if lost is workers[0] else (second, first)
    places = [dict(span.attributes or {}).get("pagewire.worker") for span in memory.spans]
    assert places == [None, one_place, one_place, None, other, other, None]


async def test_what_ends_in_an_error_says_so_and_keeps_nothing(byte_tokenizer_directory: Path) -> None:
    memory = Memory()
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, scheduler(address) as one:
        one.link.tracer = memory.tracer
        await one.engine.model()
        async with Client(one.target, retry_for=0) as client:
            with pytest.raises(grpc.aio.AioRpcError):
                await collect(client, SECRET, SamplingParams(temperature=-1))
            stream = client.generate([5] * 20, SamplingParams(max_tokens=400, ignore_eos=True))
            await anext(stream)
            await stream.aclose()
        await until(lambda: len(memory.spans) == 5)
        await closed(one)
    refused, *phases, left = memory.spans
    assert refused.status.is_ok is False
    assert dict(refused.attributes or {})["error.type"] == "INVALID_ARGUMENT"
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert dict(left.attributes or {})["rpc.response.status_code"] == "CANCELLED"
    assert SECRET not in "".join(span.to_json() for span in memory.spans)


@pytest.mark.parametrize("has_tracer", [True, False])
async def test_the_log_has_the_trace_that_the_caller_names(has_tracer: bool, byte_tokenizer_directory: Path) -> None:
    """Also where no spans are made; and an unsampled trace has none, on no side of the wire."""
    memory = Memory()
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, scheduler(address) as one:
        one.link.tracer = memory.tracer if has_tracer else None
        await one.engine.model()
        sampling = SamplingParams(max_tokens=3)
        async with grpc.aio.insecure_channel(one.target) as channel:
            with structlog.testing.capture_logs() as logs:
                call = InferenceServiceStub(channel).Generate(
                    pb.GenerateRequest(text="a", sampling=sampling), metadata=caller(sampled=False)
                )
                async for _ in call:
                    assert not one.engine.requests.traced
                await until(lambda: any(log["event"] == "request closed" for log in logs))
        (line,) = [log for log in logs if log["event"] == "request closed"]
    assert line["trace_id"] == TRACE
    assert not memory.spans


@pytest.mark.parametrize("header", ["", "00-0-0-01", "x" * 2000, "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_a_trace_that_makes_no_sense_is_none(header: str, byte_tokenizer_directory: Path) -> None:
    memory = Memory()
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, scheduler(address) as one:
        one.link.tracer = memory.tracer
        await one.engine.model()
        async with grpc.aio.insecure_channel(one.target) as channel:
            request = pb.GenerateRequest(text="a", sampling=SamplingParams(max_tokens=3))
            async for _ in InferenceServiceStub(channel).Generate(request, metadata=(("traceparent", header),)):
                pass
        await until(lambda: len(memory.spans) == 4)
    assert memory.spans[-1].parent is None


def test_a_context_without_a_span_has_no_header() -> None:
    from opentelemetry.context import Context

    assert trace_parent(Context()) == ""


# ---- real services and a real collector


@pytest.fixture(scope="module")
def traced(tiny_model_directory: Path) -> Iterator[tuple[LocalServer, Collector]]:
    """So few blocks that two requests do not fit; spans are sent within 0.2 s, not 5."""
    with pytest.MonkeyPatch.context() as patch, collector() as found:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        endpoint = ["--otlp-traces-endpoint", found.endpoint]
        blocks = ["--num-gpu-blocks-override", "40", "--block-size", "8", "--threads", "1", "--swap-space", "0.01"]
        modes = ["--preemption-mode", "swap", "--check-invariants"]
        with LocalServer(
            str(tiny_model_directory),
            worker_arguments=[*blocks, *endpoint],
            scheduler_arguments=[*modes, *endpoint],
        ) as server:
            yield server, found


def is_whole(num_computed: int) -> Any:
    """Whether the span of the whole request has come, and so many of workers."""

    def check(spans: Sequence[FoundSpan]) -> bool:
        names = [span.name for span in spans]
        return names.count("compute") == num_computed and any(name.startswith(("text", "chat")) for name in names)

    return check


async def test_a_collector_hears_of_a_request_from_every_process_and_nothing_of_its_content(
    traced: tuple[LocalServer, Collector],
) -> None:
    server, found = traced
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, n=2, temperature=0.5, top_p=0.9, seed=1)
    traces = [f"{number:032x}" for number in (1, 2, 3)]
    async with grpc.aio.insecure_channel(server.target) as channel:

        async def ask(trace: str) -> list[pb.GenerateResponse]:
            text = f"{trace} {SECRET} {'which is long ' * 5}"
            call = InferenceServiceStub(channel).Generate(
                pb.GenerateRequest(text=text, sampling=sampling), metadata=caller(trace)
            )
            return [message async for message in call]

        worker, _ = server.processes
        with halted(worker):
            asked = asyncio.gather(*map(ask, traces))
            await until_requests(server.admin_target, 3)
        answers = await asked
    have_swapped = 0
    for trace, messages in zip(traces, answers, strict=True):
        spans = await asyncio.to_thread(found.wait_for, trace, is_whole(2))
        (whole,) = [span for span in spans if span.name == "text_completion tiny-llama"]
        assert whole.parent == CALLER
        assert {span.parent for span in spans if span is not whole} == {whole.span}
        assert whole.attributes["gen_ai.operation.name"] == "text_completion"
        assert whole.attributes["gen_ai.request.top_p"] == pytest.approx(0.9)
        assert whole.attributes["gen_ai.usage.input_tokens"] == messages[-1].usage.prompt_tokens
        assert whole.attributes["gen_ai.usage.output_tokens"] == 80
        assert whole.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
        assert whole.attributes["gen_ai.response.id"] == messages[0].request_id
        phases = [span for span in spans if span.service == "pagewire-scheduler" and span is not whole]
        names = [span.name for span in phases]
        assert names[:2] == ["queue", "prefill"]
        assert "decode" in names  # behind a preemption, if there was no room for its first token
        have_swapped += any(span.attributes.get("pagewire.preemption") == "swap" for span in phases)
        computed = [span for span in spans if span.service == "pagewire-worker"]
        assert sorted(span.attributes["pagewire.output.index"] for span in computed) == [0, 1]
        for span in computed:
            assert span.attributes["pagewire.sampled_tokens"] == 40
            assert whole.start < span.start < span.end <= whole.end
            assert "first token" in span.events
        assert not whole.is_error
    assert have_swapped
    assert SECRET not in repr(found.spans)


async def test_a_chat_over_http_is_in_its_callers_trace(traced: tuple[LocalServer, Collector]) -> None:
    server, found = traced
    trace = f"{4:032x}"
    body = {"model": "tiny-llama", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 3}
    headers = {"traceparent": caller(trace)[0][1]}
    url = f"{server.http_url}/v1/chat/completions"
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as answer:
        assert (await answer.json())["usage"]["completion_tokens"] <= 3
    spans = await asyncio.to_thread(found.wait_for, trace, is_whole(1))
    assert {span.service for span in spans} == {"pagewire-scheduler", "pagewire-worker"}
    (whole,) = [span for span in spans if span.name == "chat tiny-llama"]
    assert whole.parent == CALLER
    assert SECRET not in repr(found.spans)


async def test_a_beam_search_has_one_span_on_a_worker_however_many_beams_come_and_go(
    traced: tuple[LocalServer, Collector],
) -> None:
    server, found = traced
    trace = f"{5:032x}"
    async with grpc.aio.insecure_channel(server.target) as channel:
        sampling = SamplingParams(max_tokens=20, beam_width=3)
        request = pb.GenerateRequest(text="hello", sampling=sampling)
        async for _ in InferenceServiceStub(channel).Generate(request, metadata=caller(trace)):
            pass
    spans = await asyncio.to_thread(found.wait_for, trace, is_whole(1))
    assert [span.name for span in spans if span.service == "pagewire-scheduler"][1:] == ["queue", "beam search"]
    (computed,) = [span for span in spans if span.name == "compute"]
    assert computed.attributes["pagewire.steps"] == 20


async def test_without_the_collector_requests_are_served_and_services_end_in_time(tiny_model_directory: Path) -> None:
    endpoint = ["--otlp-traces-endpoint", f"http://{free_address()}"]
    arguments = ["--num-gpu-blocks-override", "40", "--block-size", "8", "--threads", "1", *endpoint]
    server = LocalServer(str(tiny_model_directory), worker_arguments=arguments, scheduler_arguments=endpoint)
    try:
        async with Client(server.target) as client:
            completion = await collect(client, "hello", SamplingParams(max_tokens=5, ignore_eos=True))
            assert len(completion.outputs[0].token_ids) == 5
    finally:
        statuses = await asyncio.to_thread(server.stop)
    assert statuses == [0, 0]
