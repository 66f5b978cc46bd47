"""A front end's calls in the engine that follows a lost one: nothing is refused twice, and nothing is left."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from engines import until
from fake_worker_service import FakeWorkerService, serving

from pagewire_common.calls.errors import RequestError
from pagewire_common.processes.temporary import TemporaryFolder
from scheduler_service.engine.engine import Engine
from scheduler_service.engine.front_ends.servicer import FrontEnds
from scheduler_service.frontend.link import engine_call, engine_link
from scheduler_service.frontend.link.engine_call import EngineCall
from scheduler_service.frontend.link.engine_link import EngineLink
from scheduler_service.frontend.output.request import GenerationRequest
from scheduler_service.server import engine_server
from scheduler_service.settings import SchedulerSettings
from scheduler_service.wire.sampling import RequestSampling


class Engines:
    """One engine after the other at one socket, and the link of a front end."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.link = EngineLink(target)
        self.running = asyncio.create_task(self.link.run())
        self.engine: Engine
        self._stack = AsyncExitStack()

    async def start(self, *workers: str, **settings: Any) -> None:
        self.engine = Engine(SchedulerSettings(workers=list(workers), model="fake", check_invariants=True, **settings))
        await self._stack.enter_async_context(engine_server(FrontEnds(self.engine, 1), self.target))
        run = asyncio.create_task(self.engine.run())

        async def stop() -> None:
            run.cancel()
            with suppress(asyncio.CancelledError):
                await run

        self._stack.push_async_callback(stop)
        await self.link.welcome

    async def kill(self) -> None:
        """The link sees the end of its connection, without a goodbye."""
        await self._stack.aclose()
        await until(lambda: self.link.connection.is_held)

    async def until_restored(self) -> None:
        await until(lambda: not self.link.connection.is_held)


@asynccontextmanager
async def engines() -> AsyncIterator[Engines]:
    with TemporaryFolder("engine") as folder:
        found = Engines(f"unix:{folder / 'engine'}")
        try:
            async with asyncio.timeout(60):
                yield found
        finally:
            found.running.cancel()
            with suppress(asyncio.CancelledError):
                await found.running
            await found.link.connection.close()
            await found._stack.aclose()


def request(name: str, **sampling: Any) -> GenerationRequest:
    parameters = RequestSampling(**{"max_tokens": 40, **sampling})
    return GenerationRequest(request_id=name, prompt_token_ids=[5, 6], sampling=parameters)


async def test_calls_are_admitted_again_beyond_each_limit_and_leave_nothing(byte_tokenizer_directory: Path) -> None:
    """A call of each kind: admitted, refused, with a request, closed before the next engine, asked meanwhile."""
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as worker, engines() as one:
        await one.start(worker, max_num_requests=3)
        model, link = await one.link.model(), one.link
        with EngineCall(link) as admitted, EngineCall(link) as side, EngineCall(link) as call:
            await admitted.admit("admitted", 10)
            await admitted.hold(5)
            await side.admit_side_call(7)
            await call.admit("call", 10)
            state = await call.submit(request("call"), model)
            with EngineCall(link) as early:
                await early.admit("closed early", 10)
                with EngineCall(link) as refused:
                    with pytest.raises(RequestError, match="3 requests are in flight"):
                        await refused.admit("refused", 10)
                    await one.kill()
            with EngineCall(link) as late:
                asking = asyncio.create_task(late.admit("late", 10))
                await one.start(worker, max_num_requests=1)
                await one.until_restored()
                with pytest.raises(RequestError, match="2 requests are in flight"):
                    await asking
            admission = one.engine.requests.admission
            await until(lambda: [*admission.being_checked, *one.engine.requests.in_flight] == ["admitted", "call"])
            assert admission.num_bytes == 25
            assert sum([len(delta.token_ids) async for delta in state.stream]) == 40
        await until(lambda: admission.num_bytes == 0 and not one.engine.requests.in_flight)
        assert not admission.being_checked
        assert not link.open_calls
        assert not link.connection._questions


async def test_a_call_that_ends_while_others_are_restored_leaves_nothing(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as worker, engines() as one:
        await one.start(worker)
        model, link, waits = await one.link.model(), one.link, asyncio.Event()
        with EngineCall(link) as first, EngineCall(link) as second:
            await first.admit("first", 10)
            await first.submit(request("first", max_tokens=1000), model)
            await second.admit("second", 10)
            monkeypatch.setattr(second, "restore", waits.wait)
            await one.kill()
            await one.start(worker)
            await until(lambda: "first" in one.engine.requests.in_flight)
            first.__exit__()
            await until(lambda: not one.engine.requests.in_flight)
            waits.set()
            await one.until_restored()


async def test_a_request_that_ends_engine_after_engine_ends_itself(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_call, "MAX_ENGINES", 2)
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as worker, engines() as one:
        await one.start(worker)
        model = await one.link.model()
        with EngineCall(one.link) as call:
            await call.admit("call", 10)
            state = await call.submit(request("call", max_tokens=100_000), model)
            for _ in range(2):
                assert not state.stream.has_failed
                await one.kill()
                await one.start(worker)
                await one.until_restored()
            with pytest.raises(RequestError, match="2 engines have ended while this request was in flight") as error:
                _ = [delta async for delta in state.stream]
        assert error.value.code is grpc.StatusCode.INTERNAL


async def test_a_request_goes_on_with_workers_of_another_size(byte_tokenizer_directory: Path) -> None:
    """A worker that starts again may have fewer blocks."""
    async with (
        serving(FakeWorkerService(byte_tokenizer_directory, num_device_blocks=100)) as worker,
        serving(FakeWorkerService(byte_tokenizer_directory, num_device_blocks=50)) as smaller,
        engines() as one,
    ):
        await one.start(worker)
        model = await one.link.model()
        with EngineCall(one.link) as call:
            await call.admit("call", 10)
            state = await call.submit(request("call"), model)
            await one.kill()
            await one.start(smaller)
            assert sum([len(delta.token_ids) async for delta in state.stream]) == 40
        assert (await one.link.model()).pool_tokens < model.pool_tokens


async def test_an_engine_with_another_model_or_none_ends_the_front_end(
    byte_tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_tokenizer_directory / "tokenizer.json").read_bytes() + b" ")
    for is_there in (True, False):
        async with (
            serving(FakeWorkerService(byte_tokenizer_directory)) as worker,
            serving(FakeWorkerService(tmp_path)) as other,
            engines() as one,
        ):
            await one.start(worker)
            model = await one.link.model()
            with EngineCall(one.link) as call:
                await call.admit("call", 10)
                state = await call.submit(request("call", max_tokens=100_000), model)
                monkeypatch.setattr(engine_link, "ENGINE_SECONDS", 60.0 if is_there else 0.01)
                one.link.welcome.result().no_worker_timeout = 0
                await one.kill()
                if is_there:
                    await one.start(other)
                assert not await one.running
                with pytest.raises(RequestError, match="the engine is gone"):
                    _ = [delta async for delta in state.stream]
