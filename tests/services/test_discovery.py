"""Where workers are looked for, and how they join and leave while the server runs."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from engines import running, submit, text_of, until
from fake_worker_service import FakeWorkerService, serving
from scheduler_in_process import scheduler
from structlog.testing import capture_logs

from pagewire.v1 import admin_service_pb2 as pb
from pagewire.v1.admin_service_pb2_grpc import AdminServiceStub
from pagewire_common.settings import load_settings
from scheduler_service.engine.sessions.discovery import resolve_by_dns, watch_name
from scheduler_service.engine.workers import WorkerStatus
from scheduler_service.settings import SchedulerSettings

SOON = 0.001


class Names:
    """A resolver with one name, whose addresses a test sets."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = frozenset(addresses)
        self.error: Exception | None = None
        self.num_questions = 0

    async def __call__(self, name: str, port: int) -> frozenset[str]:
        assert (name, port) == ("workers", 50052)
        self.num_questions += 1
        if self.error is not None:
            raise self.error
        return self.addresses

    async def until_asked_again(self) -> None:
        asked = self.num_questions
        await until(lambda: self.num_questions >= asked + 2)  # one question may have been on its way


NAME = "dns:///workers:50052"


def test_targets_are_addresses_and_names() -> None:
    settings = load_settings(SchedulerSettings, "x", ["--workers", "10.0.0.1:1,dns:///workers:50052,[::1]:2"])
    assert settings.workers == ["10.0.0.1:1", "dns:///workers:50052", "[::1]:2"]


@pytest.mark.parametrize(
    "target", ["workers", "dns:///workers", "dns:///:1", "dns://8.8.8.8/workers:1", "dns:workers:x"]
)
def test_anything_else_is_refused_with_both_forms(target: str) -> None:
    with pytest.raises(SystemExit) as error:
        load_settings(SchedulerSettings, "x", ["--workers", target])
    assert f"'{target}' is neither HOST:PORT nor dns:///NAME:PORT" in str(error.value)


async def test_the_systems_resolver_gives_every_address_once() -> None:
    assert "127.0.0.1:7" in await resolve_by_dns("localhost", 7)
    assert await resolve_by_dns("127.0.0.1", 7) == {"127.0.0.1:7"}


async def test_addresses_of_the_new_protocol_are_written_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(*_: object, **__: object) -> list[object]:
        stream = (socket.SOCK_STREAM, 6, "")
        return [
            (socket.AF_INET6, *stream, ("fd00::2", 7, 0, 0)),
            (socket.AF_INET, *stream, ("10.0.0.2", 7)),
            (socket.AF_INET, *stream, ("10.0.0.2", 7)),
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert await resolve_by_dns("workers", 7) == {"[fd00::2]:7", "10.0.0.2:7"}


@pytest.mark.parametrize("errno", [socket.EAI_NONAME, socket.EAI_NODATA])
async def test_a_name_without_addresses_is_no_error(errno: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(*_: object, **__: object) -> None:
        raise socket.gaierror(errno, "not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert await resolve_by_dns("workers", 7) == frozenset()


async def test_a_failing_resolver_changes_nothing() -> None:
    names = Names("a:1")
    async with asyncio.timeout(30), contextlib.aclosing(watch_name(NAME, names, SOON)) as changes:
        assert await anext(changes) == {"a:1"}
        names.error = socket.gaierror(socket.EAI_AGAIN, "try again")
        following = asyncio.ensure_future(anext(changes))
        await names.until_asked_again()
        assert not following.done()
        names.error = UnicodeError("label too long")
        await names.until_asked_again()
        assert not following.done()
        names.addresses, names.error = frozenset(("a:1", "b:1")), None
        assert await following == {"a:1", "b:1"}


@contextlib.asynccontextmanager
async def three_workers(directory: Path) -> AsyncIterator[dict[str, FakeWorkerService]]:
    async with contextlib.AsyncExitStack() as stack:
        workers = [FakeWorkerService(directory) for _ in range(3)]
        yield {await stack.enter_async_context(serving(worker)): worker for worker in workers}


async def test_workers_join_and_leave_while_the_server_runs(byte_tokenizer_directory: Path) -> None:
    async with three_workers(byte_tokenizer_directory) as workers:
        first, second, third = workers
        names = Names()
        async with running(NAME, resolve=names, discovery_interval=SOON) as engine:
            early = asyncio.create_task(submit(engine, "early", [5]))
            await names.until_asked_again()
            assert not engine.workers.all
            names.addresses = frozenset((first,))
            assert await text_of(engine, await early) == "ggggg"
            names.addresses = frozenset((first, second, third))
            await until(lambda: sum(worker.admits for worker in engine.workers.all) == 3)
            assert {worker.client.address for worker in engine.workers.all} == set(workers)
            states = [await submit(engine, str(number), [5] * 100, max_tokens=50) for number in range(40)]
            assert await asyncio.gather(*(text_of(engine, state) for state in states)) == ["g" * 50] * 40
            assert all(worker.num_steps for worker in workers.values())


async def test_a_name_that_loses_an_address_cuts_no_session_but_does_not_connect_again(
    byte_tokenizer_directory: Path,
) -> None:
    async with three_workers(byte_tokenizer_directory) as workers:
        address, worker = next(iter(workers.items()))
        names = Names(address)
        async with running(NAME, resolve=names, discovery_interval=SOON, no_worker_timeout=30) as engine:
            state = await submit(engine, "a", [5], max_tokens=100)
            worker.runs.clear()
            await until(lambda: worker.num_sessions == 1)
            names.addresses = frozenset()
            await names.until_asked_again()
            (loop,) = engine.workers.all
            assert loop.state is WorkerStatus.SERVING
            worker.runs.set()
            assert await text_of(engine, state) == "g" * 100
            worker.spoil = lambda answer: type(answer)()  # ends the session
            await submit(engine, "b", [5])
            await until(lambda: not engine.workers.all)
            assert worker.num_sessions == 1


async def test_an_address_that_comes_back_while_its_session_lives_is_connected_again(
    byte_tokenizer_directory: Path,
) -> None:
    async with three_workers(byte_tokenizer_directory) as workers:
        address, worker = next(iter(workers.items()))
        names = Names(address)
        async with running(NAME, resolve=names, discovery_interval=SOON) as engine:
            await engine.model()
            (loop,) = engine.workers.all
            await until(lambda: loop.admits)
            names.addresses = frozenset()
            await until(lambda: not loop.is_wanted)
            names.addresses = frozenset((address,))
            await until(lambda: loop.is_wanted)
            whole = worker.spoil
            worker.spoil = lambda answer: type(answer)()
            state = await submit(engine, "a", [5])
            await until(lambda: loop.num_losses)
            worker.spoil = whole
            assert await text_of(engine, state) == "ggggg"
            assert engine.workers.all == [loop]


async def test_an_address_without_a_worker_is_given_up_with_its_name(byte_tokenizer_directory: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        hole = f"127.0.0.1:{silent.getsockname()[1]}"
        async with serving(FakeWorkerService(byte_tokenizer_directory)) as address:
            names = Names(hole)
            async with running(address, NAME, resolve=names, discovery_interval=SOON) as engine:
                await until(lambda: len(engine.workers.all) == 2)
                assert await text_of(engine, await submit(engine, "a", [5])) == "ggggg"
                assert {worker.state.value for worker in engine.workers.all} == {"serving", "connecting"}
                names.addresses = frozenset()
                await until(lambda: len(engine.workers.all) == 1)


async def test_an_address_that_is_given_and_behind_a_name_is_one_worker(byte_tokenizer_directory: Path) -> None:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address:
        names = Names(address)
        async with running(address, NAME, NAME, resolve=names, discovery_interval=SOON) as engine:
            await names.until_asked_again()
            assert len(engine.workers.all) == 1
            names.addresses = frozenset()
            await names.until_asked_again()
            assert [worker.is_wanted for worker in engine.workers.all] == [True]


async def test_a_worker_behind_two_addresses_is_connected_once(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.info.instance_id = "one and the same"
    async with serving(worker) as first, serving(worker) as second, running(first, second) as engine:
        await until(lambda: any("connected as" in loop.last_error for loop in engine.workers.all))
        assert await text_of(engine, await submit(engine, "a", [5])) == "ggggg"
        assert sorted(loop.state for loop in engine.workers.all) == ["connecting", "serving"]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("model_fingerprint", "other", "the worker's model fingerprint is other; that of earlier workers is f"),
        ("dtype", "bfloat16", "the worker's dtype is bfloat16; that of earlier workers is float32"),
        ("block_size", 16, "the worker's block size is 16; that of earlier workers is 8; start it with --block-size 8"),
    ],
)
async def test_a_worker_that_differs_is_refused_and_shown_with_both_values(
    field: str, value: object, reason: str, byte_tokenizer_directory: Path
) -> None:
    first, other = FakeWorkerService(byte_tokenizer_directory), FakeWorkerService(byte_tokenizer_directory)
    setattr(other.info, field, value)
    async with serving(first) as address, serving(other) as late:
        names = Names()
        async with (
            scheduler(address, NAME, resolve=names, discovery_interval=SOON) as one,
            grpc.aio.insecure_channel(one.admin_target) as channel,
        ):

            async def shown() -> tuple[bool, str]:
                state = (await AdminServiceStub(channel).GetClusterState(pb.GetClusterStateRequest())).state
                (worker,) = (worker for worker in state.workers if worker.address == late)
                return worker.connected, worker.last_error

            await one.engine.model()
            with capture_logs() as logs:
                names.addresses = frozenset((late,))
                await until(lambda: any(loop.last_error == reason for loop in one.engine.workers.all))
            refused = {"event": "worker unavailable", "log_level": "warning", "worker": late, "reason": reason}
            assert refused in logs
            assert await shown() == (False, reason)
            assert not other.num_sessions
            other.info.CopyFrom(first.info)  # an operator corrects it
            await until(lambda: all(loop.admits for loop in one.engine.workers.all))
            assert await shown() == (True, "")
