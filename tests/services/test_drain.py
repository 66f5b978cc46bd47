"""Workers are drained, by their own shutdown or by an operator, and no request loses a token."""

import asyncio
from pathlib import Path

import grpc
import pytest
from engines import running, submit, text_of, until
from fake_worker_service import FakeWorkerService, serving
from grpc_health.v1 import health_pb2

from pagewire_common.calls.errors import RequestError
from scheduler_service.engine.workers import WorkerStatus

LEAVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_drained_worker_finishes_what_it_has_and_is_left_alone(byte_tokenizer_directory: Path) -> None:
    worker, other = FakeWorkerService(byte_tokenizer_directory), FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, serving(other) as late, running(address, late) as engine:
        drained, free = engine.workers.all
        engine.fleet.drain(free)
        await until(lambda: drained.admits)
        worker.runs.clear()
        first = await submit(engine, "first", [5], max_tokens=50)
        await until(lambda: not engine.requests.waiting)
        engine.fleet.undrain(free)
        engine.fleet.drain(drained)
        assert (drained.state, drained.draining) == (WorkerStatus.DRAINING, True)
        second = await submit(engine, "second", [5])
        assert await text_of(engine, second) == "ggggg"
        assert drained.state is WorkerStatus.DRAINING
        worker.runs.set()
        assert await text_of(engine, first) == "g" * 50
        await until(lambda: drained.state is WorkerStatus.DRAINED)
        assert other.num_prompts == 1
        assert (drained.num_losses, worker.num_sessions) == (0, 1)
        assert drained.last_error == "drained by an operator"
        engine.fleet.undrain(drained)
        await until(lambda: drained.state is WorkerStatus.SERVING)


async def test_what_outlasts_the_grace_goes_on_elsewhere(byte_tokenizer_directory: Path) -> None:
    worker, other = FakeWorkerService(byte_tokenizer_directory), FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, serving(other) as late, running(address, late, grace=0.05) as engine:
        drained, free = engine.workers.all
        engine.fleet.drain(free)
        await until(lambda: drained.admits)
        worker.runs.clear()
        state = await submit(engine, "a", [5], n=2)
        group = engine.group(state)
        await until(lambda: not engine.requests.waiting)
        engine.fleet.undrain(free)
        engine.fleet.drain(drained)
        assert await text_of(engine, state) == "g" * 10
        assert drained.state is WorkerStatus.DRAINED
        assert drained.last_error == "drained by an operator; its remaining requests go on elsewhere"
        assert (group.suspicion, drained.num_losses, drained.num_preemptions) == (None, 0, 0)


async def test_a_drain_that_is_taken_back_before_it_is_over_changes_nothing(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address, grace=0.05) as engine:
        (loop,) = engine.workers.all
        await until(lambda: loop.admits)
        worker.runs.clear()
        state = await submit(engine, "a", [5])
        await until(lambda: not engine.requests.waiting)
        engine.fleet.drain(loop)
        engine.fleet.undrain(loop)
        past_the_grace = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, past_the_grace.set)
        await past_the_grace.wait()
        worker.runs.set()
        assert await text_of(engine, state) == "ggggg"
        assert (worker.num_sessions, loop.num_preemptions) == (1, 0)


async def test_an_unknown_address_is_not_found_and_the_known_ones_are_named(byte_tokenizer_directory: Path) -> None:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, running(address) as engine:
        with pytest.raises(RequestError, match=f"there is no worker 'nowhere:1'; known: {address}") as error:
            engine.workers.find("nowhere:1")
        assert error.value.code is grpc.StatusCode.NOT_FOUND


async def test_a_worker_that_says_it_is_leaving_is_given_nothing_more(byte_tokenizer_directory: Path) -> None:
    """Its health stream reports it at once, long before the next check."""
    worker, other = FakeWorkerService(byte_tokenizer_directory), FakeWorkerService(byte_tokenizer_directory)
    async with (
        serving(worker) as address,
        serving(other) as late,
        running(address, late, health_interval=1000) as engine,
    ):
        leaving, free = engine.workers.all
        engine.fleet.drain(free)
        await until(lambda: leaving.admits)
        worker.runs.clear()
        first = await submit(engine, "first", [5])
        await until(lambda: not engine.requests.waiting)
        engine.fleet.undrain(free)
        await worker.set("", LEAVING)
        await until(lambda: leaving.state is WorkerStatus.DRAINING)
        assert await text_of(engine, await submit(engine, "second", [5])) == "ggggg"
        worker.runs.set()
        assert await text_of(engine, first) == "ggggg"
        assert other.num_prompts == 1


async def test_a_worker_that_does_not_serve_yet_is_not_connected(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    await worker.set("", LEAVING)
    async with serving(worker) as address, running(address) as engine:
        (loop,) = engine.workers.all
        await until(lambda: "not serving" in loop.last_error)
        assert worker.num_sessions == 0
        await worker.set("", health_pb2.HealthCheckResponse.SERVING)
        await until(lambda: loop.admits)


async def test_without_a_worker_that_takes_requests_those_that_wait_do_so_for_a_limited_time(
    byte_tokenizer_directory: Path,
) -> None:
    """Requests that run on a drained worker are not ended."""
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address, no_worker_timeout=0.1) as engine:
        (loop,) = engine.workers.all
        await until(lambda: loop.admits)
        worker.runs.clear()
        first = await submit(engine, "first", [5])
        await until(lambda: not engine.requests.waiting)
        engine.fleet.drain(loop)
        with pytest.raises(RequestError, match=r"no worker took requests for 0\.1 s") as error:
            await text_of(engine, await submit(engine, "second", [5]))
        assert error.value.code is grpc.StatusCode.UNAVAILABLE
        worker.runs.set()
        assert await text_of(engine, first) == "ggggg"


async def test_what_comes_back_from_a_drained_worker_waits_for_a_limited_time_too(
    byte_tokenizer_directory: Path,
) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory, poison=99)
    async with serving(worker) as address, running(address, no_worker_timeout=0.1, grace=0.3) as engine:
        (loop,) = engine.workers.all
        await until(lambda: loop.admits)
        worker.runs.clear()
        state = await submit(engine, "a", [5])
        await until(lambda: not engine.requests.waiting)
        engine.fleet.drain(loop)
        with pytest.raises(RequestError, match="no worker took requests"):
            await text_of(engine, state)
        assert loop.state is WorkerStatus.DRAINED


async def test_the_service_is_well_until_an_outage_outlasts_the_patience_of_requests(
    byte_tokenizer_directory: Path,
) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address, no_worker_timeout=0.05) as engine:
        (loop,) = engine.workers.all
        health = engine.fleet.watch_health()
        assert await anext(health) is True
        engine.fleet.drain(loop)
        assert await anext(health) is False
        engine.fleet.undrain(loop)
        assert await anext(health) is True


async def test_a_short_outage_does_not_show_in_the_services_health(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address, no_worker_timeout=1000) as engine:
        (loop,) = engine.workers.all
        health = engine.fleet.watch_health()
        assert await anext(health) is True
        following = asyncio.ensure_future(anext(health))
        for _ in range(3):
            engine.fleet.drain(loop)
            await until(lambda: loop.state is WorkerStatus.DRAINED)
            engine.fleet.undrain(loop)
            await until(lambda: loop.admits)
        assert not following.done()
        following.cancel()
