"""While nothing can serve, a client waits for as long as it was told, and says for what."""

import asyncio
import logging
import time
from pathlib import Path

import grpc
import pytest
from engines import running, submit, text_of, until
from fake_worker_service import FakeWorkerService, serving
from scheduler_in_process import scheduler

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import Client
from pagewire_client import retry as module
from pagewire_client.admin import Admin
from pagewire_client.cli.watch import View
from pagewire_client.llm import collect
from pagewire_client.retry import PATIENCE_HEADER, Backoff
from pagewire_common.calls.errors import RequestError
from scheduler_service.engine.worker_link.client import WorkerClient
from scheduler_service.engine.workers import Worker, Workers
from scheduler_service.frontend.link.engine_link import patience

DEAD = "127.0.0.1:1"
REFUSED = r"no worker took requests for .* s: 127\.0\.0\.1:1: UNAVAILABLE: .*refused"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_SECONDS", 0.05)


@pytest.mark.usefixtures("soon")
async def test_the_wait_is_bounded_and_its_reason_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server by itself would wait for 1,000 seconds."""
    monkeypatch.setattr(module.log, "disabled", False)  # libraries that configure logging disable loggers of others
    caplog.set_level(logging.INFO, logger="pagewire_client")
    async with scheduler(DEAD, no_worker_timeout=1000) as one, Client(one.target, retry_for=0.3) as client:
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError, match=REFUSED):
            await collect(client, "hello")
        with pytest.raises(grpc.aio.AioRpcError, match=REFUSED):
            await client.get_model()
        assert 0.6 <= time.monotonic() - began < 20
    assert caplog.messages[0].startswith(f"waiting for {one.target}: UNAVAILABLE: no worker took requests for 0.05 s")
    assert caplog.messages[0].endswith("trying again for 0.3 s")


@pytest.mark.usefixtures("soon")
async def test_a_request_that_waits_is_served_by_a_worker_that_comes(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.is_well.clear()
    async with serving(worker) as address, scheduler(address) as one, Client(one.target, retry_for=60) as client:
        asked = asyncio.create_task(collect(client, "hello"))
        await asyncio.sleep(0.1)  # more than its first wait
        worker.is_well.set()
        assert set((await asked).outputs[0].text) == {"g"}


async def test_a_loss_is_waited_through_in_the_time_that_is_left(byte_tokenizer_directory: Path) -> None:
    """An engine ends a request that has waited for as long as its client allows, with the worker's reason."""
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address, no_worker_timeout=1000) as engine:
        (loop,) = engine.workers.all
        await until(lambda: loop.admits)
        engine.fleet.drain(loop)
        patience.set(0.05)
        with pytest.raises(RequestError, match=r"for 0\.05 s: .*drained or shuts down"):
            await text_of(engine, await submit(engine, "a", [5]))


@pytest.mark.parametrize("value", ["soon", "nan", "inf", "-1", ""])
async def test_a_patience_that_is_no_number_of_seconds_is_refused(value: str) -> None:
    async with scheduler(DEAD) as one, grpc.aio.insecure_channel(one.target) as channel:
        stub, metadata = InferenceServiceStub(channel), ((PATIENCE_HEADER, value),)
        with pytest.raises(grpc.aio.AioRpcError, match=f"{PATIENCE_HEADER} is '{value}'; it must be") as error:
            await stub.GetModel(pb.GetModelRequest(), metadata=metadata)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_what_the_server_waited_for_counts() -> None:
    now = 0.0
    backoff = Backoff(60.0, clock=lambda: now)
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "no worker")
    offered = [float(backoff.attempt()[0][1])]
    now += offered[0]
    now += backoff.pause(error)
    offered.append(float(backoff.attempt()[0][1]))
    assert offered == pytest.approx([2.0, 60.0 - now], abs=0.001)
    now += offered[1]
    with pytest.raises(grpc.aio.AioRpcError):
        backoff.pause(error)
    assert now == pytest.approx(60.0, abs=0.01)
    assert Backoff(0).attempt() == ()


async def test_watch_says_why_a_worker_does_not_serve(byte_tokenizer_directory: Path) -> None:
    other = FakeWorkerService(byte_tokenizer_directory)
    other.info.model_id = "another"
    async with serving(other) as address, scheduler(DEAD, address) as one, Admin(one.admin_target) as admin:
        await until(lambda: all(worker.last_error != "not connected yet" for worker in one.engine.workers.all))
        view = View(one.admin_target)
        view.take(await admin.state())
        _, dead, mismatched = view.line().splitlines()
        assert dead.startswith(f"{DEAD}: UNAVAILABLE")
        assert mismatched == f"{address}: the worker serves the model 'another', this scheduler 'fake'"
        async with Client(one.target, retry_for=0.01) as client:
            with pytest.raises(grpc.aio.AioRpcError, match="the worker serves the model 'another'"):
                await client.get_model()


async def test_a_port_of_another_kind_is_told_from_a_worker() -> None:
    async with scheduler(DEAD) as other, running(other.target) as engine:
        (loop,) = engine.workers.all
        await until(lambda: "does not have this call: --workers names the workers' --listen" in loop.last_error)


async def test_a_shutdown_does_not_wait_for_requests_that_nothing_can_serve(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_service.engine.engine.UNSERVED_SECONDS", 0.05)
    worker = FakeWorkerService(byte_tokenizer_directory, poison=7)
    async with serving(worker) as address, running(DEAD, address, time_limit=20) as engine:
        await until(lambda: engine.workers.admits)
        worker.is_well.clear()  # it is lost, and does not come back
        lost = await submit(engine, "a", [7])
        await until(lambda: not engine.workers.serving)
        await engine.drain(1000)
        with pytest.raises(RequestError, match="shutting down"):
            await text_of(engine, lost)


async def test_a_shutdown_waits_for_what_a_drained_worker_computes(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_service.engine.engine.UNSERVED_SECONDS", 0.0)
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address, time_limit=20) as engine:
        (loop,) = engine.workers.all
        await until(lambda: loop.admits)
        worker.runs.clear()
        state = await submit(engine, "a", [5])
        await until(lambda: not engine.requests.waiting)
        engine.fleet.drain(loop)
        draining = asyncio.create_task(engine.drain(1000))
        answer = asyncio.create_task(text_of(engine, state))
        await asyncio.sleep(0.02)
        worker.runs.set()
        assert await answer == "ggggg"
        await draining


@pytest.mark.parametrize("is_locked", [False, True])
async def test_clients_of_a_locked_server_are_told_no_workers_address(is_locked: bool, tmp_path: Path) -> None:
    async with running(DEAD, api_keys=tmp_path / "keys" if is_locked else None) as engine:
        with pytest.raises(RequestError, match=r"no worker took requests for 2 s: ") as error:
            engine.engine.requests.refuse_unserved(2)
    assert (DEAD in str(error.value)) != is_locked


async def test_reasons_are_few_and_name_their_workers() -> None:
    workers = Workers(["dns:///workers:1"], 1.0)
    assert workers.why_unserved() == "none is found at dns:///workers:1"
    for number in range(5):
        workers.add(worker := Worker(WorkerClient(f"w:{number}"), 1))
        worker.last_error = "gone"
    assert workers.why_unserved() == "w:0: gone; w:1: gone; w:2: gone; and 2 more"
    for worker in workers.all:
        await worker.client.close()
