"""What a request waited for: measured, told to its client, logged, and remembered for operators within bounds."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from cluster import until_idle
from engines import running, submit, until
from fake_worker_service import FakeWorkerService, serving
from scheduler_in_process import InProcess, scheduler
from structlog.testing import capture_logs

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.admin_service_pb2 import FinishedRequest
from pagewire.v1.engine_service_pb2 import Standing
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.admin import Admin
from pagewire_client.llm import collect
from pagewire_common.calls.errors import RequestError
from scheduler_service import core
from scheduler_service.core import SchedulerOutput
from scheduler_service.core.outputs import NewSequence
from scheduler_service.engine.calls import requests as requests_module
from scheduler_service.engine.calls.calls import Call, Outbox
from scheduler_service.engine.engine import Engine
from scheduler_service.frontend.output.request import GenerationRequest, Resumption
from scheduler_service.frontend.output.request_memory import UnreadOutput
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.frontend.output.streams import Turns
from scheduler_service.settings import SchedulerSettings
from scheduler_service.statistics.counts import FinishedRequests, RequestCounts, RequestMetrics


@pytest.fixture
async def one(byte_tokenizer_directory: Path) -> AsyncIterator[InProcess]:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, scheduler(address) as one:
        await one.engine.model()
        yield one


def state_of(resumption: Resumption, **sampling: object) -> RequestState:
    """A request that arrived at second 100."""
    parameters = core.SamplingParams(max_tokens=9, **sampling)  # type: ignore[arg-type]
    request = GenerationRequest(request_id="a", prompt_token_ids=[1, 2, 3], sampling=parameters, resumption=resumption)
    state = RequestState(request, None, RequestCounts(), Turns(), UnreadOutput(1 << 30))
    state.times.arrived_at = 100.0
    return state


def gain(state: RequestState, index: int, now: float) -> None:
    assert not state.gain_token(index, 7, now)


def figures(
    queued: float | None = None,
    first: float | None = None,
    mean: float | None = None,
    longest: float | None = None,
    total: float = 20.0,
) -> RequestMetrics:
    """Of a request that was never preempted, and found nothing in the cache."""
    return RequestMetrics(queued, first, mean, longest, total, 0, 0, 0, 0)


async def test_pauses_are_between_tokens_of_one_output_and_waits_count_from_the_arrival() -> None:
    state = state_of(Resumption(), n=2)
    assert state.metrics(120.0) == figures()
    state.standing = Standing(queued_seconds=1.5)
    assert state.metrics(120.0) == figures(1.5)
    gain(state, 0, 103.0)
    assert state.metrics(120.0) == figures(1.5, 3.0)
    gain(state, 1, 104.0)
    for now in (106.0, 107.0):
        gain(state, 0, now)
    gain(state, 1, 109.0)
    assert state.metrics(120.0) == figures(1.5, 3.0, (3 + 1 + 5) / 3, 5.0)


async def test_a_request_was_queued_until_a_worker_took_it_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, outbox = Engine(SchedulerSettings(workers=["gone:1"], model="fake")), Outbox()
    call = engine.requests.in_flight["a"] = Call(outbox, 1, "a")
    call.group = core.SequenceGroup("a", [1, 2, 3], core.SamplingParams(max_tokens=9), arrived_at=100.0)
    taken = SchedulerOutput(step_id=1, new_sequences=[NewSequence(call.group.sequences[0], [], 0)])
    call.tell_standing()
    for now in (101.5, 104.0):  # again, after a preemption
        monkeypatch.setattr(requests_module, "time", SimpleNamespace(monotonic=lambda now=now: now))
        engine.requests.admitted(taken)
    before, *told = [event.standing for event in outbox.take().events]
    assert not before.HasField("queued_seconds")
    assert [standing.queued_seconds for standing in told] == [1.5, 1.5]
    state = state_of(Resumption())
    for standing in (before, *told):
        state.stands(standing)
    assert sum(state.counts.queue_seconds.counts) == 1
    await engine.workers.all[0].client.close()


@pytest.mark.parametrize("is_aborted", [True, False])
async def test_a_request_that_ends_without_a_worker_has_lost_the_one_it_had(
    is_aborted: bool, byte_tokenizer_directory: Path
) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address) as engine:
        await until(lambda: engine.workers.admits)
        worker.runs.clear()
        state = await submit(engine, "a", [5])
        await until(lambda: state.standing.HasField("queued_seconds"))
        engine.settings.no_worker_timeout = 1000 if is_aborted else 0.01
        engine.fleet.drain(engine.workers.all[0])
        engine.workers.all[0].drained_by = 0.0
        if is_aborted:
            await until(lambda: "a" in engine.requests.waiting)
            engine.requests.abort("a")
            assert (await anext(state.stream)).status is core.SequenceStatus.FINISHED_ABORTED
        else:
            with pytest.raises(RequestError, match=r"no worker took requests for 0\.01 s"):
                await anext(state.stream)
        assert state.standing.num_recomputes == 1
        await engine.close(state)


async def test_the_tokens_of_a_beam_search_are_those_of_everything_that_it_found(tiny_server: LocalServer) -> None:
    before = await until_idle(tiny_server.admin_target)
    async with Client(tiny_server.target) as client, Admin(tiny_server.admin_target) as admin:
        sampling = SamplingParams(max_tokens=6, ignore_eos=True, beam_width=4, n=2)
        messages = [message async for message in client.generate("hello", sampling, request_id="beams")]
        after = await until_idle(tiny_server.admin_target)
        (finished,) = await admin.finished_requests(1)
    assert [message.usage.output_tokens for message in messages if message.finish_reason] == [6, 6]
    assert (finished.request_id, finished.output_tokens) == ("beams", 4 * 6)
    assert after.num_output_tokens - before.num_output_tokens == 4 * 6


async def test_tokens_that_an_earlier_stream_brought_make_no_pauses() -> None:
    state = state_of(Resumption(token_ids=((7, 7, 7), (7,))), n=2)
    gain(state, 0, 103.0)
    assert state.metrics(120.0) == figures(None, 3.0)
    gain(state, 0, 105.0)
    assert state.metrics(120.0) == figures(None, 3.0, 2.0, 2.0)


async def test_the_message_that_ends_the_last_output_says_what_the_request_waited_for(tiny_server: LocalServer) -> None:
    async with Client(tiny_server.target) as client:
        sampling = SamplingParams(n=3, max_tokens=6, temperature=1.0, seed=7, ignore_eos=True)
        messages = [message async for message in client.generate("x" * 40, sampling)]
        again = await collect(client, "x" * 40, SamplingParams(max_tokens=1))
    assert [message.HasField("metrics") for message in messages] == [False] * (len(messages) - 1) + [True]
    metrics = messages[-1].metrics
    assert 0 <= metrics.queued_seconds < metrics.first_token_seconds < metrics.total_seconds
    assert 0 < metrics.mean_pause_seconds <= metrics.longest_pause_seconds < metrics.total_seconds
    assert metrics.first_token_seconds + 5 * metrics.mean_pause_seconds <= metrics.total_seconds + 1e-4
    assert (metrics.num_recompute_preemptions, metrics.num_swap_preemptions, metrics.num_worker_changes) == (0, 0, 0)
    assert again.metrics.cached_tokens == again.cached_tokens == 32
    assert again.metrics.HasField("first_token_seconds")
    assert not again.metrics.HasField("mean_pause_seconds")


@pytest.mark.parametrize("sampling", [{"best_of": 3, "n": 2}, {"beam_width": 2, "n": 2}])
async def test_outputs_that_are_chosen_at_the_end_come_with_the_figures_of_all(
    tiny_server: LocalServer, sampling: dict[str, int]
) -> None:
    async with Client(tiny_server.target) as client:
        parameters = SamplingParams(max_tokens=6, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        messages = [message async for message in client.generate("hello", parameters)]
    assert [message.HasField("metrics") for message in messages] == [False] * (len(messages) - 1) + [True]
    metrics = messages[-1].metrics
    assert metrics.queued_seconds < metrics.first_token_seconds <= metrics.total_seconds
    assert metrics.HasField("mean_pause_seconds") == ("best_of" in sampling)


async def test_a_request_that_waits_for_room_says_so_and_how_often_it_was_preempted(
    tiny_model_directory: Path,
) -> None:
    """Six of 100 tokens in a pool of 144, of which some always wait: whenever they come, later ones make room."""
    arguments = ["--num-gpu-blocks-override", "18", "--block-size", "8", "--threads", "1", "--swap-space", "0"]
    with LocalServer(str(tiny_model_directory), worker_arguments=arguments) as server:
        async with Client(server.target) as client, Admin(server.admin_target) as admin:
            prompts = [[token_id] * 30 for token_id in range(5, 11)]
            sampling = SamplingParams(max_tokens=70, ignore_eos=True)
            completions = await asyncio.gather(*(collect(client, prompt, sampling) for prompt in prompts))
            finished = await admin.finished_requests()
    preemptions = [completion.metrics.num_recompute_preemptions for completion in completions]
    assert sum(preemptions) >= 1
    preempted = completions[preemptions.index(max(preemptions))].metrics
    assert preempted.longest_pause_seconds > 2 * preempted.mean_pause_seconds
    assert {request.metrics.num_recompute_preemptions for request in finished} == set(preemptions)


async def test_a_request_that_goes_on_elsewhere_counts_the_change_and_the_loss(byte_tokenizer_directory: Path) -> None:
    workers = [FakeWorkerService(byte_tokenizer_directory) for _ in range(2)]
    async with serving(workers[0]) as first, serving(workers[1]) as second, scheduler(first, second) as one:
        await until(lambda: len(one.engine.workers.serving) == 2)
        async with Client(one.target) as client:
            stream = client.generate([5] * 20, SamplingParams(max_tokens=300), request_id="moves")
            await anext(stream)
            (loop,) = [loop for scheduler_, loop in one.engine.workers.serving.items() if scheduler_.running]
            one.engine.settings.grace = 0.0
            one.engine.fleet.drain(loop)
            messages = [message async for message in stream]
    metrics = messages[-1].metrics
    assert messages[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert (metrics.num_worker_changes, metrics.num_recompute_preemptions) == (1, 1)


async def test_the_log_and_the_list_say_of_each_request_how_it_ended_and_never_what_it_said(one: InProcess) -> None:
    async with Client(one.target) as client, Admin(one.admin_target) as admin:
        with capture_logs() as logs:
            await collect(client, "secret", SamplingParams(max_tokens=4, n=2))
            stream = client.generate("secret", SamplingParams(max_tokens=400), request_id="left", tenant="a tenant")
            await anext(stream)
            await stream.aclose()
            await until(lambda: len(one.engine.requests.finished) == 2)
        closed = [log for log in logs if log["event"] == "request closed"]
        left, whole = await admin.finished_requests()
        assert [request.request_id for request in await admin.finished_requests(1)] == ["left"]
    assert (left.request_id, left.tenant, list(left.finish_reasons)) == ("left", "a tenant", ["abort"])
    assert list(whole.finish_reasons) == ["length", "length"]
    assert (whole.prompt_tokens, whole.output_tokens) == (6, 8)
    assert closed[0]["output_tokens"] == [4, 4]
    assert closed[0]["total_seconds"] == pytest.approx(whole.metrics.total_seconds)
    assert closed[0]["longest_pause_seconds"] == pytest.approx(whole.metrics.longest_pause_seconds)
    for said in ("secret", "gggg"):
        assert said not in str(logs)
        assert said.encode() not in whole.SerializeToString()


async def test_a_request_that_no_worker_was_given_has_no_figures_but_how_long_it_took(one: InProcess) -> None:
    one.engine.fleet.drain(one.engine.workers.all[0])
    async with Client(one.target, retry_for=0) as client, Admin(one.admin_target) as admin:
        stream = client.generate([5], SamplingParams(max_tokens=4), request_id="waits")
        waiting = asyncio.create_task(anext(stream))
        await until(lambda: one.engine.requests.waiting)
        assert await client.abort("waits")
        assert (await waiting).finish_reason == pb.FINISH_REASON_ABORT
        await stream.aclose()
        await until(lambda: len(one.engine.requests.finished))
        (request,) = await admin.finished_requests()
    assert [field.name for field, _ in request.metrics.ListFields()] == ["total_seconds"]


@pytest.mark.parametrize("limit", [0, 1001])
async def test_a_limit_out_of_bounds_is_refused(one: InProcess, limit: int) -> None:
    async with Admin(one.admin_target) as admin:
        with pytest.raises(grpc.aio.AioRpcError, match=rf"limit is {limit}; it must be in \[1, 1000\]"):
            await admin.finished_requests(limit)


def ended(name: str, tenant: str = "") -> FinishedRequest:
    return FinishedRequest(
        request_id=name,
        tenant=tenant,
        finish_reasons=["stop"],
        prompt_tokens=1,
        output_tokens=1,
        metrics=figures().encode(),
    )


def test_what_is_remembered_is_bounded_in_number_and_in_bytes_and_the_oldest_goes_first() -> None:
    finished = FinishedRequests(max_requests=10, max_bytes=3000)
    for number in range(100):
        finished.add(ended(str(number)))
    assert [request.request_id for request in finished.newest(1000)] == [str(n) for n in range(99, 89, -1)]
    assert [request.request_id for request in finished.newest(2)] == ["99", "98"]
    for number in range(100):
        finished.add(ended(str(number), tenant="t" * 900))
        assert finished.num_bytes == sum(request.ByteSize() for request in finished.newest(1000)) <= 3000
    assert [request.request_id for request in finished.newest(1000)] == ["99", "98", "97"]


def test_the_command_line_shows_the_requests_that_ended_last(tiny_server: LocalServer) -> None:
    async def generate() -> None:
        async with Client(tiny_server.target) as client:
            async for _ in client.generate("hello", SamplingParams(max_tokens=3), request_id="id\x1b[31m"):
                pass

    asyncio.run(generate())
    command = [
        sys.executable,
        "-m",
        "pagewire_client",
        "requests",
        "--target",
        tiny_server.admin_target,
        "--limit",
        "1",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert "id�[31m" in result.stdout
    assert "\x1b" not in result.stdout
