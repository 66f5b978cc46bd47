"""A front end's calls in the engine that follows a lost one: nothing is refused twice, and nothing is left."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
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
from scheduler_service.frontend.link.feed import PageFeed
from scheduler_service.frontend.output.request import GenerationRequest
from scheduler_service.frontend.output.request_state import RequestState
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
        self.front_ends: FrontEnds
        self._stack = AsyncExitStack()

    async def start(self, *workers: str, **settings: Any) -> None:
        self.engine = Engine(SchedulerSettings(workers=list(workers), model="fake", check_invariants=True, **settings))
        run = asyncio.create_task(self.engine.run())

        async def stop() -> None:
            run.cancel()
            with suppress(asyncio.CancelledError):
                await run

        self._stack.push_async_callback(stop)  # when the link is cut
        self.front_ends = FrontEnds(self.engine, 1)
        await self._stack.enter_async_context(engine_server(self.front_ends, self.target))
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


async def num_tokens(state: RequestState) -> int:
    return sum([len(delta.token_ids) async for delta in state.stream])


async def test_a_request_goes_on_if_the_next_engine_ends_before_it_answers(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as worker, engines() as one:
        await one.start(worker)
        model, link = await one.link.model(), one.link
        with EngineCall(link) as call:
            await call.admit("call", 10)
            state = await call.submit(request("call", max_tokens=400), model)
            await one.kill()
            with monkeypatch.context() as patch:
                patch.setattr(link.connection, "answer", lambda *_: None)
                await one.start(worker)
                await one.until_restored()
            await one.kill()
            await one.start(worker)
            assert await num_tokens(state) == 400


async def test_the_first_event_after_an_engine_reaches_the_next_one(byte_tokenizer_directory: Path) -> None:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as worker, engines() as one:
        await one.start(worker)
        one.link.listens("here:1")
        await one.kill()
        await one.start(worker)
        await until(lambda: [connection.address for connection in one.front_ends.connections] == ["here:1"])


async def test_clients_that_leave_or_have_all_during_an_outage_do_not_wait_and_leave_nothing(
    byte_tokenizer_directory: Path,
) -> None:
    """A call whose outputs have ended keeps no request id from a call that resumes it."""
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as worker, engines() as one:
        await one.start(worker)
        model, link = await one.link.model(), one.link
        with EngineCall(link) as over, EngineCall(link) as open_still, EngineCall(link) as again:
            for call, name in (over, "over"), (open_still, "open still"):
                await call.admit(name, 10)
                state = await call.submit(request(name), model)
                assert await num_tokens(state) == 40
            with EngineCall(link) as gone:
                gone._ask_admission("gone", 10, 0, resumes=False, adapter_name="")
            await one.kill()
            assert not link.connection._held
            await over.close()
            with EngineCall(link) as left:
                asking = asyncio.create_task(left.admit("left", 10))
                await until(lambda: link.connection._held)
            await asking
            reading = asyncio.create_task(link.abort("left"))
            await until(lambda: link.connection._held)
            reading.cancel()
            await asyncio.wait((reading,))
            assert not link.connection._held
            await one.start(worker)
            await one.until_restored()
            await again.admit("open still", 10, resumes=True)
            assert [*one.engine.requests.admission.being_checked] == ["open still"]


async def test_a_call_in_an_outage_waits_no_longer_than_it_may(byte_tokenizer_directory: Path) -> None:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as worker, engines() as one:
        await one.start(worker)
        await one.link.model()
        await one.kill()
        engine_link.patience.set(0.01)
        with (
            EngineCall(one.link) as call,
            pytest.raises(RequestError, match=r"engine restarts, and took no requests for 0\.01 s"),
        ):
            await call.admit("call", 10)
        assert not one.link.connection._held


async def test_a_page_reads_the_next_engine(byte_tokenizer_directory: Path) -> None:
    """Its stream ends with the engine, and it connects again while there is none."""
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as worker, engines() as one:
        await one.start(worker)
        await one.link.model()
        with one.link.feed.page("") as page:
            await page.begin()
            assert worker in await snapshot(page)
            await one.kill()
            while await page.next() is not None:
                pass
        with one.link.feed.page("") as page:
            begins = asyncio.create_task(page.begin())
            await one.start(worker)
            await begins
            assert worker in await snapshot(page)


async def snapshot(page: PageFeed) -> str:
    """The first frame of a page."""
    first = (await page.next() or b"").decode()
    assert '"snapshot":true' in first
    return first


async def test_a_refused_call_ends_its_parts_and_no_other_request(byte_tokenizer_directory: Path) -> None:
    """The refused call's adapter is unknown to the next engine, as after LoadLoraAdapter."""
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as worker, engines() as one:
        await one.start(worker)
        model, link = await one.link.model(), one.link
        with EngineCall(link) as other, EngineCall(link) as call, EngineCall(link) as part:
            await other.admit("other", 10)
            goes_on = await other.submit(request("other", max_tokens=400), model)
            await call.admit("call", 10)
            ends = await part.submit(request("call-0", max_tokens=400), model, part_of=call)
            assert call._admit is not None
            call._admit.adapter_name = "gone"
            await one.kill()
            await one.start(worker)
            with pytest.raises(RequestError, match="there is no adapter 'gone'"):
                await num_tokens(ends)
            with EngineCall(link) as later, pytest.raises(RequestError, match="there is no adapter 'gone'"):
                await later.submit(request("call-1"), model, part_of=call)
            assert await num_tokens(goes_on) == 400


async def test_an_adapter_with_other_weights_is_refused(byte_tokenizer_directory: Path) -> None:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as worker, engines() as one:
        await one.start(worker)
        with EngineCall(one.link) as call:
            await call.admit("call", 10)
            assert call._admission is not None
            call._admission.result().adapter_id = "other weights"
            await one.kill()
            await one.start(worker)
            await one.until_restored()
            await until(lambda: call._admission is not None and call._admission.result().code)
            with pytest.raises(RequestError, match="has other weights since the engine's restart"):
                await call.admitted()


async def test_requests_wait_for_the_next_engines_worker_whatever_its_sizes(byte_tokenizer_directory: Path) -> None:
    async with (
        serving(FakeWorkerService(byte_tokenizer_directory)) as worker,
        serving(FakeWorkerService(byte_tokenizer_directory, num_device_blocks=60)) as smaller,
        engines() as one,
    ):
        await one.start(worker, no_worker_timeout=0)
        await until(lambda: one.link.loading.model is not None and not one.engine.workers.outage.is_on)
        model = await one.link.model()
        with EngineCall(one.link) as call:
            await call.admit("call", 10)
            state = await call.submit(request("call", max_tokens=400), model)
            await one.kill()
            await one.start(smaller, no_worker_timeout=0)
            assert await num_tokens(state) == 400
        assert (await one.link.model()).context_length == 60 * 8


async def test_a_call_that_was_resumed_meanwhile_does_not_come_back(byte_tokenizer_directory: Path) -> None:
    """Its client is gone, and has resumed it at a front end that is quicker to attach."""
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as worker, engines() as one:
        await one.start(worker)
        model, link = await one.link.model(), one.link
        with EngineCall(link) as before, EngineCall(link) as later:
            asked = replace(request("call"), resumes=True)
            await before.admit("call", 10, resumes=True)
            broken = await before.submit(replace(asked, sampling=request("", max_tokens=400).sampling), model)
            await one.kill()
            restored, link.open_calls = link.open_calls, {}
            await one.start(worker)
            await one.until_restored()
            await later.admit("call", 10, resumes=True)
            state = await later.submit(asked, model)
            await restored[before.number].restore()
            with pytest.raises(RequestError, match="request_id is in flight already"):
                await num_tokens(broken)
            assert await num_tokens(state) == 40
