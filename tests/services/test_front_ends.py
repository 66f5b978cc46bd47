"""Front ends are processes of their own: each loses only what it holds, and together they are one service."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from cluster import cluster_state, connected_to_each, front_ends, until_idle
from engines import running, submit, until
from fake_worker_service import FakeWorkerService, serving
from forked import true_start
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from pagewire.v1 import engine_service_pb2 as pb_engine
from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.engine_service_pb2_grpc import EngineServiceStub
from pagewire_client import Client, LocalServer, SamplingParams, local
from pagewire_client.admin import Admin, Sample
from pagewire_client.llm import collect
from pagewire_client.local import ServiceProcess
from pagewire_common.calls.errors import RequestError
from pagewire_common.serving.server import LIVENESS
from pagewire_common.start_error import StartError
from scheduler_service import server as engine_server
from scheduler_service.engine.calls.calls import Outbox
from scheduler_service.engine.front_ends import servicer as engine_servicer
from scheduler_service.frontend import server as front_end_server
from scheduler_service.frontend.http.limits import Limits
from scheduler_service.frontend.http.server import HttpServer
from scheduler_service.frontend.link.engine_link import EngineLink
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.frontend.output.streams import OutputDelta

LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0)
LONGEST = SamplingParams(max_tokens=490, ignore_eos=True, temperature=0)
"""As long as the model and four such requests at once allow."""


@pytest.fixture(scope="module")
def server(tiny_model_directory: Path) -> Iterator[LocalServer]:
    """Two front ends, and an engine that admits four requests."""
    with LocalServer(
        str(tiny_model_directory),
        worker_arguments=[
            "--num-gpu-blocks-override",
            "256",
            "--block-size",
            "8",
            "--threads",
            "1",
            "--swap-space",
            "0",
        ],
        scheduler_arguments=["--frontends", "2", "--max-num-requests", "4", "--check-invariants"],
    ) as server:
        yield server


@pytest.fixture
def true_schedulers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system ends front ends with their scheduler, and not a fork server in its place."""
    start = local.start_process

    def start_process(module: str, arguments: Sequence[str]) -> Any:
        return (true_start if module == "scheduler_service" else start)(module, arguments)

    monkeypatch.setattr(local, "start_process", start_process)


def request(
    name: str, text: str = "a prompt", sampling: pb.SamplingParams = LONG, **fields: object
) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id=name, text=text, sampling=sampling, **fields)


Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


async def rest_of(call: Call) -> list[pb.GenerateResponse]:
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    assert await call.code() is grpc.StatusCode.OK
    return messages


async def outputs(call: Call) -> list[int]:
    return [token_id for message in await rest_of(call) for token_id in message.token_ids]


async def expected(server: LocalServer, text: str = "a prompt") -> list[int]:
    async with Client(server.target) as client:
        return (await collect(client, text, LONG)).outputs[0].token_ids


async def test_a_front_end_that_is_killed_takes_only_its_own_streams_and_is_started_again(server: LocalServer) -> None:
    tokens = await expected(server)
    async with connected_to_each(server.target) as stubs:
        (victim, doomed), (_, other) = stubs.items()
        lost, kept = doomed.Generate(request("lost")), other.Generate(request("kept"))
        first = await lost.read()
        held = list(first.token_ids)
        keeping = asyncio.create_task(outputs(kept))
        psutil.Process(victim).send_signal(signal.SIGKILL)
        with contextlib.suppress(grpc.aio.AioRpcError):
            while True:
                held += (await lost.read()).token_ids
        assert await lost.code() is grpc.StatusCode.UNAVAILABLE
        resume = pb.ResumeState(outputs=[pb.ResumedOutput(token_ids=held)], seed=first.seed)
        assert held + await outputs(other.Generate(request("lost", resume=resume))) == tokens
        assert await keeping == tokens
    await until_idle(server.admin_target)
    async with asyncio.timeout(30):
        await until(lambda: len(front_ends(server.target)) == 2)
    async with connected_to_each(server.target) as stubs:
        assert victim not in stubs


async def test_a_front_end_that_stands_still_costs_the_streams_of_others_nothing(server: LocalServer) -> None:
    """As a loop in a tokenizer would make it, or a thousand clients that read slowly."""
    tokens = await expected(server)
    async with connected_to_each(server.target) as stubs:
        (stopped, still), (_, other) = stubs.items()
        held = still.Generate(request("held"))
        first = await held.read()
        psutil.Process(stopped).send_signal(signal.SIGSTOP)
        try:
            for number in range(3):
                assert await outputs(other.Generate(request(str(number)))) == tokens
        finally:
            psutil.Process(stopped).send_signal(signal.SIGCONT)
        assert [*first.token_ids, *await outputs(held)] == tokens


async def test_health_and_liveness_tell_of_an_engine_that_hangs(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone can be restarted, by what asks for liveness."""
    monkeypatch.setattr(front_end_server, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(front_end_server, "MAX_SILENT_SECONDS", 0.5)
    monkeypatch.setattr(engine_servicer, "BEAT_SECONDS", 0.05)
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, running(address) as one:
        server = front_end_server.front_end_server(one.link, shares_port=False)
        target = await server.start("127.0.0.1:0")
        watching = asyncio.create_task(front_end_server.watch_engine(one.link, server, HttpServer(one.link, Limits())))
        async with grpc.aio.insecure_channel(target) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=LIVENESS))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            monkeypatch.setattr(engine_servicer, "BEAT_SECONDS", 1000)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            for connection in one.front_ends.connections:
                connection.outbox.tell(0, statistics_wanted=pb_engine.StatisticsWanted())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watching.cancel()
        await server.server.stop(None)


async def test_front_ends_share_the_memory_of_unread_output() -> None:
    async with running("127.0.0.1:1", request_memory=1.0) as one:
        assert one.link.requests.unread.most == 2**28
        one.front_ends.num_expected = 4
        other = EngineLink(one.target)
        reading = asyncio.create_task(other.run())
        assert (await other.welcome).unread_bytes == 2**26
        reading.cancel()
        await asyncio.wait([reading])
        await other.connection.close()


async def test_what_a_front_end_has_counted_stays_when_it_is_gone() -> None:
    async with running("127.0.0.1:1") as one:
        other = EngineLink(one.target)
        reading = asyncio.create_task(other.run())
        await other.welcome
        other.requests.counts.of("").num_outputs["stop"] += 3
        other.requests.counts.of("").token_seconds.observe(0.5)
        one.link.requests.counts.of("").num_outputs["stop"] += 1
        for _ in range(2):
            counts = (await one.front_ends.counts()).tenants[""]
            assert (counts.num_outputs["stop"], counts.token_seconds.total) == (4, 0.5)
            reading.cancel()
            await asyncio.wait([reading])
            await until(lambda: len(one.front_ends.connections) == 1)
        await other.connection.close()


async def test_steps_wait_while_a_front_end_has_too_much_to_take(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, goes_on = FakeWorkerService(byte_tokenizer_directory), asyncio.Event()
    async with serving(worker) as address, running(address) as one:
        await one.model()
        monkeypatch.setattr(Outbox, "has_room", False)
        monkeypatch.setattr(Outbox, "room", lambda _: goes_on.wait())
        state = await submit(one, "a", [5], max_tokens=100)
        await until(lambda: worker.num_steps == 1 + one.settings.max_in_flight_steps)
        assert one.workers.all[0].num_steps == 1
        monkeypatch.undo()
        goes_on.set()
        assert sum([len(delta.token_ids) async for delta in state.stream]) == 100
        await one.close(state)


async def test_a_front_end_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_servicer, "MAX_SILENT_SECONDS", 0.01)
    killed: list[int] = []
    async with running("127.0.0.1:1") as one:
        one.front_ends.kill = killed.append
        async with grpc.aio.insecure_channel(one.target) as channel:
            call = EngineServiceStub(channel).Attach()
            listening = pb_engine.Listening(address="127.0.0.1:1", process_id=123)
            await call.write(pb_engine.AttachRequest(events=[pb_engine.FrontendEvent(listening=listening)]))
            while await call.read() is not grpc.aio.EOF:  # it answers nothing
                pass
    assert 123 in killed


async def test_a_stop_string_ends_its_output_wherever_the_request_is(byte_tokenizer_directory: Path) -> None:
    """The engine hears of it when the request may be waiting again, with no worker left; the others go on."""
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address) as one:
        await one.model()
        worker.runs.clear()
        state = await submit(one, "a", [5, 6], n=3, max_tokens=40)
        group = one.group(state)
        (loop,) = one.workers.all
        one.engine.fleet.drain(loop)
        loop.drained_by = 0.0
        await until(lambda: loop.scheduler is None)
        assert "a" in one.requests.waiting
        one.engine.requests.stop_output(one.requests.in_flight["a"], 1)
        one.engine.requests.stop_output(one.requests.in_flight["a"], 1)  # again, which does nothing
        assert [sequence.status.is_finished for sequence in group.sequences] == [False, True, False]
        worker.runs.set()
        one.engine.fleet.undrain(loop)
        ended = {delta.index async for delta in _until_two_end(state)}
        assert ended == {0, 2}
        await one.close(state)


async def _until_two_end(state: RequestState) -> AsyncIterator[OutputDelta]:
    num_open = 2
    async for delta in state.stream:
        if delta.status is not None:
            yield delta
            num_open -= 1
            if not num_open:
                return


async def test_request_ids_aborts_and_limits_are_of_the_whole(server: LocalServer) -> None:
    async with connected_to_each(server.target) as stubs:
        one, other = stubs.values()
        calls = [one.Generate(request("first", sampling=LONGEST)), other.Generate(request("second", sampling=LONGEST))]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await other.Generate(request("first")).read()
        assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
        calls += [one.Generate(request("third", sampling=LONGEST)), one.Generate(request("fourth", sampling=LONGEST))]
        for call in calls[2:]:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await other.Generate(request("fifth", sampling=LONGEST)).read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await other.Abort(pb.AbortRequest(request_id="first"))).aborted
        assert not (await other.Abort(pb.AbortRequest(request_id="no such request"))).aborted
        *_, last = await rest_of(calls[0])
        assert last.finish_reason == pb.FINISH_REASON_ABORT
        for call in calls:
            call.cancel()
    await until_idle(server.admin_target)


async def test_operators_see_the_whole_through_any_front_end(server: LocalServer) -> None:
    before = await cluster_state(server.admin_target)
    async with connected_to_each(server.target) as stubs:
        for number, stub in enumerate(stubs.values()):
            await outputs(stub.Generate(request(str(number))))
    after = await until_idle(server.admin_target)
    assert after.num_output_tokens - before.num_output_tokens == 2 * LONG.max_tokens


@pytest.mark.usefixtures("true_schedulers")
def test_the_whole_drains_and_ends_with_the_engine(tiny_model_directory: Path) -> None:
    server = LocalServer(str(tiny_model_directory), scheduler_arguments=["--frontends", "2"])
    children = front_ends(server.target)
    assert len(children) == 2
    assert server.stop() == [0, 0]
    assert not [child for child in children if child.is_running()]


@pytest.mark.usefixtures("true_schedulers")
async def test_front_ends_end_with_an_engine_that_is_killed(tiny_model_directory: Path) -> None:
    with LocalServer(str(tiny_model_directory), scheduler_arguments=["--frontends", "2"]) as server:
        children = front_ends(server.target)
        folder = Path(children[0].cmdline()[children[0].cmdline().index("--engine") + 1].removeprefix("unix:")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        async with Client(server.target, retry_for=0) as client:
            stream = client.generate("a prompt", LONG)
            await anext(stream)
            server.processes[1].process.kill()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for _ in stream:
                    pass
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        gone, alive = await asyncio.to_thread(psutil.wait_procs, children, 30)
        assert (len(gone), alive) == (2, [])
    LocalServer(str(tiny_model_directory)).stop()
    assert not folder.exists()  # the next engine has removed it, if no other did


async def test_a_tokenizer_that_cannot_be_loaded_is_said_again_and_again(tmp_path: Path) -> None:
    """A front end that lives on without its server would hold the port for nothing."""
    (tmp_path / "tokenizer.json").write_text("{")
    async with serving(FakeWorkerService(tmp_path)) as address:
        scheduler = ServiceProcess(
            "scheduler_service", ["--listen", "127.0.0.1:0", "--workers", address, "--model", "fake"]
        )
        try:
            target = str((await asyncio.to_thread(scheduler.wait_for, "admin listening", 60))["address"])
            for _ in range(2):
                await asyncio.to_thread(scheduler.wait_for, "the model's tokenizer cannot be loaded", 60)
                async with Admin(target) as admin, aclosing(admin.watch(0.1)) as events:
                    async for event in events:
                        if isinstance(event, Sample) and event.state.front_end_error:
                            break
                assert event.state.front_end_error.startswith(
                    "a front end cannot load the model's tokenizer, and tries"
                )
                assert "line 1 column" in event.state.front_end_error
                await asyncio.to_thread(scheduler.wait_for, "front end ended and is started again", 60)
        finally:
            assert await asyncio.to_thread(scheduler.stop) == 0


PANICKING = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "continuing_subword_prefix": "##", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]},
}
"""A tokenizer at which the library itself fails: half of a merge is shorter than what it should begin with."""


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [("{", "line 1 column"), (json.dumps(PANICKING), "the tokenizers library has failed")],
    ids=["no JSON", "panic"],
)
async def test_why_no_front_end_is_serving_is_known_until_all_have_loaded_the_model(
    tokenizer: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    async with serving(FakeWorkerService(tmp_path)) as address, running(address) as one:
        with pytest.raises(RequestError, match="the model's tokenizer cannot be loaded") as error:
            await one.link.model()
        assert error.value.code is grpc.StatusCode.UNAVAILABLE
        assert "until the served model is known" in one.link.request_limits().will_grow
        await until(lambda: one.front_ends.error)
        assert reason in one.front_ends.error
        assert "pagewire-" not in one.front_ends.error
        with capture_logs() as logs, pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_servicer, "SHOW_SECONDS", 0.01)
            waiting = asyncio.create_task(one.front_ends.until_serving())
            await until(lambda: [log for log in logs if log["event"] == "not ready: no front end shows SERVING"])
        assert one.front_ends.error in [log.get("reason") for log in logs]
        one.front_ends.num_expected = 2
        one.link.connection.say(0, health_shown=pb_engine.HealthShown(serving=True))
        await waiting
        assert one.front_ends.error
        one.front_ends.num_expected = 1
        one.link.connection.say(0, health_shown=pb_engine.HealthShown(serving=True))
        await until(lambda: not one.front_ends.error)


async def test_that_no_worker_takes_requests_is_told_also_while_no_front_end_can_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ready it is when both are there."""
    monkeypatch.setattr(engine_server, "_spare_the_collector", lambda: None)
    (tmp_path / "tokenizer.json").write_text("{")
    no_worker = "not serving: no worker takes requests"
    async with (
        serving(FakeWorkerService(tmp_path)) as address,
        running(address, no_worker_timeout=0.05, time_limit=30) as one,
    ):
        with capture_logs() as logs:
            announcing = asyncio.create_task(engine_server.announce(one.engine, one.front_ends))
            with pytest.raises(StartError, match=r"tokenizer\.json cannot be read"):
                await one.link.loading.wait()
            await until(lambda: one.front_ends.is_serving)
            one.engine.fleet.drain(one.engine.workers.all[0])
            await until(lambda: not one.front_ends.is_serving)
            one.link.connection.say(0, health_shown=pb_engine.HealthShown(serving=True))
            await until(lambda: all(connection.shows_serving for connection in one.front_ends.connections))
            one.engine.fleet.undrain(one.engine.workers.all[0])
            await until(lambda: logs[-1]["event"] == "ready")
            announcing.cancel()
    assert [log["event"] for log in logs if log["event"] in (no_worker, "ready")] == [no_worker, "ready"]


async def test_a_request_id_is_free_when_its_stream_has_ended_whichever_front_end_comes_next(
    server: LocalServer,
) -> None:
    short = SamplingParams(max_tokens=1, temperature=0)
    async with connected_to_each(server.target) as stubs:
        for stub in [*stubs.values()] * 50:
            assert await outputs(stub.Generate(pb.GenerateRequest(request_id="again", text="a", sampling=short)))


async def test_what_stands_behind_the_goodbye_hides_it_from_no_front_end() -> None:
    """Answers may be told in the same moment; calls that come after it end at once."""
    async with running("127.0.0.1:1") as one:
        async with asyncio.timeout(30):
            for connection in one.front_ends.connections:
                connection.outbox.tell(0, goodbye=pb_engine.Goodbye())
                connection.outbox.tell(0, statistics_wanted=pb_engine.StatisticsWanted())
            await until(lambda: not one.front_ends.connections)
            with pytest.raises(RequestError, match="the server is shutting down"):
                await one.link.abort("a")


def test_a_sigterm_to_every_process_drains_as_one_to_the_engine_does(tiny_model_directory: Path) -> None:
    async def drain() -> list[int]:
        async with Client(server.target, retry_for=0) as client:
            stream = client.generate("a prompt", LONG)
            first = await anext(stream)
            for process in (*front_ends(server.target), psutil.Process(server.processes[1].process.pid)):
                process.send_signal(signal.SIGTERM)
            return [*first.token_ids, *[token_id async for message in stream for token_id in message.token_ids]]

    with LocalServer(str(tiny_model_directory), scheduler_arguments=["--frontends", "2"]) as server:
        assert len(asyncio.run(drain())) == LONG.max_tokens
