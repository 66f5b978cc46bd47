"""Front ends are processes of their own: each loses only what it holds, and together they are one service."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from cluster import cluster_state, until_idle
from engines import running, submit, until
from fake_worker_service import FakeWorkerService, serving
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.v1 import engine_service_pb2 as pb_engine
from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.engine_service_pb2_grpc import EngineServiceStub
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import collect
from pagewire_client.local import ServiceProcess
from pagewire_common.errors import RequestError
from pagewire_common.server import LIVENESS
from scheduler_service.engine import engine_servicer
from scheduler_service.engine.front_end_processes import FrontEndProcesses
from scheduler_service.engine.outbox import Outbox
from scheduler_service.frontend import server as front_end_server
from scheduler_service.frontend.engine_link import EngineLink
from scheduler_service.frontend.request import RequestState
from scheduler_service.frontend.streams import OutputDelta

LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)
LOCAL = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own


@pytest.fixture(scope="module")
def server(tiny_model_directory: Path) -> Iterator[LocalServer]:
    """Two front ends, and an engine that admits four requests."""
    with LocalServer(
        str(tiny_model_directory),
        worker_arguments=["--num-device-blocks", "256", "--block-size", "8", "--threads", "1", "--swap-space", "0"],
        scheduler_arguments=["--frontends", "2", "--max-num-requests", "4", "--check-invariants"],
    ) as server:
        yield server


def front_ends(server: LocalServer) -> list[psutil.Process]:
    return psutil.Process(server.processes[1].process.pid).children()


@asynccontextmanager
async def connected_to_each(server: LocalServer) -> AsyncIterator[dict[int, InferenceServiceStub]]:
    """A connection to each front end, by its process id."""
    stubs: dict[int, InferenceServiceStub] = {}
    channels = []
    try:
        async with asyncio.timeout(60):
            while len(stubs) < 2:
                before = {process.pid: _num_connections(process) for process in front_ends(server)}
                channel = grpc.aio.insecure_channel(server.target, options=LOCAL)
                channels.append(channel)
                stub = InferenceServiceStub(channel)
                await stub.GetModel(pb.GetModelRequest(), wait_for_ready=True)
                for process in front_ends(server):
                    if _num_connections(process) > before.get(process.pid, 0):
                        stubs.setdefault(process.pid, stub)
        yield stubs
    finally:
        for channel in channels:
            await channel.close()


def _num_connections(process: psutil.Process) -> int:
    return sum(connection.status == "ESTABLISHED" for connection in process.net_connections("tcp"))


def request(name: str, text: str = "a prompt", **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id=name, text=text, sampling=LONG, **fields)


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
    async with connected_to_each(server) as stubs:
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
    await until_idle(server.target)
    async with asyncio.timeout(30):
        await until(lambda: len(front_ends(server)) == 2)
    async with connected_to_each(server) as stubs:
        assert victim not in stubs


async def test_a_front_end_that_stands_still_costs_the_streams_of_others_nothing(server: LocalServer) -> None:
    """As a loop in a tokenizer would make it, or a thousand clients that read slowly."""
    tokens = await expected(server)
    async with connected_to_each(server) as stubs:
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
    monkeypatch.setattr(front_end_server, "MOST_SILENT_SECONDS", 0.5)
    monkeypatch.setattr(engine_servicer, "BEAT_SECONDS", 0.05)
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, running(address) as one:
        server = front_end_server.front_end_server(one.link, shares_port=False)
        target = await server.start("127.0.0.1:0")
        watching = asyncio.create_task(front_end_server.watch_engine(one.link, server))
        async with grpc.aio.insecure_channel(target) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=LIVENESS))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            monkeypatch.setattr(engine_servicer, "BEAT_SECONDS", 1000)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            for session in one.front_ends.sessions:
                session.outbox.tell(0, statistics_wanted=pb_engine.StatisticsWanted())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watching.cancel()
        await server.server.stop(None)


async def test_front_ends_share_the_memory_of_unread_output() -> None:
    async with running("127.0.0.1:1", request_memory=1.0) as one:
        assert one.link.unread.most == 2**28
        one.front_ends.num_expected = 4
        other = EngineLink(one.target)
        reading = asyncio.create_task(other.run())
        assert (await other.welcome).unread_bytes == 2**26
        reading.cancel()
        await asyncio.wait([reading])
        await other.close()


async def test_what_a_front_end_has_counted_stays_when_it_is_gone() -> None:
    async with running("127.0.0.1:1") as one:
        other = EngineLink(one.target)
        reading = asyncio.create_task(other.run())
        await other.welcome
        other.counts.num_outputs["stop"] += 3
        other.counts.token_seconds.observe(0.5)
        one.link.counts.num_outputs["stop"] += 1
        for _ in range(2):
            counts = await one.front_ends.counts()
            assert (counts.num_outputs["stop"], counts.token_seconds.total) == (4, 0.5)
            reading.cancel()
            await asyncio.wait([reading])
            await until(lambda: len(one.front_ends.sessions) == 1)
        await other.close()


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
        assert one.workers[0].num_steps == 1
        monkeypatch.undo()
        goes_on.set()
        assert sum([len(delta.token_ids) async for delta in state.stream]) == 100
        await one.close(state)


async def test_a_front_end_that_is_to_be_killed_is_and_another_begins() -> None:
    processes = FrontEndProcesses(1)
    keeping = asyncio.create_task(processes.run(["--engine", "unix:/nowhere", "--listen", "127.0.0.1:0"]))
    async with asyncio.timeout(60):
        await until(lambda: processes.process_ids)
        (first,) = processes.process_ids
        processes.kill(first + 1)  # no child of ours
        processes.kill(first)
        await until(lambda: processes.process_ids not in (set(), {first}))
        await processes.stop(set())
    assert not processes.process_ids
    await keeping


async def test_a_front_end_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_servicer, "MOST_SILENT_SECONDS", 0.01)
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
        (loop,) = one.workers
        loop.drain()
        loop._drained_by = 0.0
        await until(lambda: loop.scheduler is None)
        assert "a" in one.waiting
        one.engine.stop_output(one.requests["a"], 1)
        one.engine.stop_output(one.requests["a"], 1)  # again, which does nothing
        assert [sequence.status.is_finished for sequence in group.sequences] == [False, True, False]
        worker.runs.set()
        loop.undrain()
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
    async with connected_to_each(server) as stubs:
        one, other = stubs.values()
        calls = [one.Generate(request("first")), other.Generate(request("second"))]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await other.Generate(request("first")).read()
        assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
        calls += [one.Generate(request("third")), one.Generate(request("fourth"))]
        for call in calls[2:]:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await other.Generate(request("fifth")).read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await other.Abort(pb.AbortRequest(request_id="first"))).aborted
        assert not (await other.Abort(pb.AbortRequest(request_id="no such request"))).aborted
        *_, last = await rest_of(calls[0])
        assert last.finish_reason == pb.FINISH_REASON_ABORT
        for call in calls:
            call.cancel()
    await until_idle(server.target)


async def test_operators_see_the_whole_through_any_front_end(server: LocalServer) -> None:
    before = await cluster_state(server.target)
    async with connected_to_each(server) as stubs:
        for number, stub in enumerate(stubs.values()):
            await outputs(stub.Generate(request(str(number))))
    after = await until_idle(server.target)
    assert after.num_output_tokens - before.num_output_tokens == 2 * LONG.max_tokens


def test_the_whole_drains_and_ends_with_the_engine(tiny_model_directory: Path) -> None:
    server = LocalServer(str(tiny_model_directory), scheduler_arguments=["--frontends", "2"])
    children = front_ends(server)
    assert len(children) == 2
    assert server.stop() == [0, 0]
    assert not [child for child in children if child.is_running()]


async def test_front_ends_end_with_an_engine_that_is_killed(tiny_model_directory: Path) -> None:
    with LocalServer(str(tiny_model_directory), scheduler_arguments=["--frontends", "2"]) as server:
        children = front_ends(server)
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
            for _ in range(2):
                await asyncio.to_thread(scheduler.wait_for, "the model's tokenizer cannot be loaded", 60)
                await asyncio.to_thread(scheduler.wait_for, "front end ended and is started again", 60)
        finally:
            assert await asyncio.to_thread(scheduler.stop) == 0


async def test_a_request_id_is_free_when_its_stream_has_ended_whichever_front_end_comes_next(
    server: LocalServer,
) -> None:
    short = SamplingParams(max_tokens=1, temperature=0)
    async with connected_to_each(server) as stubs:
        for stub in [*stubs.values()] * 50:
            assert await outputs(stub.Generate(pb.GenerateRequest(request_id="again", text="a", sampling=short)))


async def test_what_stands_behind_the_goodbye_hides_it_from_no_front_end() -> None:
    """Answers may be told in the same moment; calls that come after it end at once."""
    async with running("127.0.0.1:1") as one:
        async with asyncio.timeout(30):
            for session in one.front_ends.sessions:
                session.outbox.tell(0, goodbye=pb_engine.Goodbye())
                session.outbox.tell(0, statistics_wanted=pb_engine.StatisticsWanted())
            await until(lambda: not one.front_ends.sessions)
            with pytest.raises(RequestError, match="the server is shutting down"):
                await one.link.abort("a")


def test_a_sigterm_to_every_process_drains_as_one_to_the_engine_does(tiny_model_directory: Path) -> None:
    async def drain() -> list[int]:
        async with Client(server.target, retry_for=0) as client:
            stream = client.generate("a prompt", LONG)
            first = await anext(stream)
            for process in (*front_ends(server), psutil.Process(server.processes[1].process.pid)):
                process.send_signal(signal.SIGTERM)
            return [*first.token_ids, *[token_id async for message in stream for token_id in message.token_ids]]

    with LocalServer(str(tiny_model_directory), scheduler_arguments=["--frontends", "2"]) as server:
        assert len(asyncio.run(drain())) == LONG.max_tokens
