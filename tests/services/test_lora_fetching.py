"""A worker serves while adapters are still on their way to it, and holds only as many as it has places for."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from engines import until
from lora_helpers import LONG, refusal, serving
from scheduler_in_process import scheduler
from tiny_adapters import write_adapter, write_three
from worker_in_process import slow_down, worker_in_process

from pagewire_client import Client, SamplingParams
from pagewire_client.admin import Admin
from pagewire_client.llm import collect
from pagewire_common.calls.errors import RequestError
from scheduler_service.engine.adapters import adapter_fetcher, catalogue
from scheduler_service.engine.worker_link.errors import WorkerError
from scheduler_service.recording.replayer import Replayer
from worker_service.serving import servicer
from worker_service.serving.adapter_calls import AdapterCalls
from worker_service.serving.adapters import load_adapter

SHORT = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)


class Gate:
    """Adapters come to workers only while it is open."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.num_waiting = 0

    async def __call__(self, worker: Any, device_thread: Any, pieces: AsyncIterator[Any]) -> None:
        self.num_waiting += 1
        await self.is_open.wait()
        await load_adapter(worker, device_thread, pieces)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(servicer, "load_adapter", gate)
    return gate


async def test_requests_do_not_wait_for_adapters_that_they_do_not_name(
    tiny_model_directory: Path, adapters: Path, gate: Gate
) -> None:
    async with serving(tiny_model_directory, adapters) as (one, worker), Client(one.target) as client:
        named = [asyncio.create_task(collect(client, "abc", SHORT, lora_name="two")) for _ in range(3)]
        await until(lambda: gate.num_waiting == 1)
        for _ in range(40):  # more than may overtake one that waits for room
            assert len((await collect(client, "abc", SHORT)).outputs[0].token_ids) == 8
        assert not any(task.done() for task in named)
        gate.is_open.set()
        said = [(await task).outputs[0].token_ids for task in named]
        assert said == 3 * [(await collect(client, "abc", SHORT, lora_name="two")).outputs[0].token_ids]
        await until(lambda: len(worker.worker.adapters.fingerprints) == 3)  # the others come by themselves
        assert one.engine.workers.all[0].num_losses == 0


async def test_adapters_come_with_the_epoch_of_the_session_that_they_are_for(
    tiny_model_directory: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, epochs = AdapterCalls.check, []

    def note_and_check(calls: AdapterCalls, epoch: int) -> int:
        epochs.append(epoch)
        return check(calls, epoch)

    monkeypatch.setattr(AdapterCalls, "check", note_and_check)
    async with serving(tiny_model_directory, adapters, max_cpu_loras=1) as (one, _), Client(one.target) as client:
        for name in ("one", "two"):  # which has the first one dropped
            await collect(client, "abc", SHORT, lora_name=name)
        assert len(epochs) >= 3
        assert set(epochs) == {one.engine.workers.all[0].epoch}


@pytest.mark.parametrize("places", [1, 2])
async def test_the_same_tokens_come_from_a_worker_with_few_places(
    places: int, tiny_model_directory: Path, adapters: Path, tmp_path: Path
) -> None:
    async with serving(tiny_model_directory, adapters) as (one, _), Client(one.target) as client:
        asked = [(f"{number} ", name) for number in range(6) for name in ("", "one", "two", "three")]
        expected = [(await collect(client, prompt, SHORT, lora_name=name)).outputs for prompt, name in asked]
    recording = tmp_path / "recording"
    async with (
        serving(tiny_model_directory, adapters, recording, max_cpu_loras=places) as (one, worker),
        Client(one.target) as client,
    ):
        found = await asyncio.gather(*(collect(client, prompt, SHORT, lora_name=name) for prompt, name in asked))
        assert [one.outputs[0].token_ids for one in found] == [outputs[0].token_ids for outputs in expected]
        assert len(worker.worker.adapters.fingerprints) <= places
        assert one.engine.workers.all[0].num_losses == 0
    changes = [moment.kind for moment in Replayer().run(recording)].count("adapter")
    assert changes >= 2 * 3  # each was begun, and came


async def test_an_adapter_that_all_places_are_needed_without_is_not_loaded(
    tiny_model_directory: Path, adapters: Path
) -> None:
    async with serving(tiny_model_directory, adapters, max_cpu_loras=1) as (one, worker), Client(one.target) as client:
        slow_down(worker, 0.02)
        stream = client.generate("abc", LONG, lora_name="one")
        await anext(stream)
        write_adapter(adapters / "late", 5)
        async with Admin(one.admin_target) as admin:
            with pytest.raises(grpc.aio.AioRpcError, match="no worker has a place for it") as error:
                await admin.load_adapter("late")
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert (await refusal(client, "late"))[0] is grpc.StatusCode.NOT_FOUND
            await stream.aclose()
            await until(lambda: not one.engine.requests.in_flight)
            await admin.load_adapter("late")
        assert (await collect(client, "abc", SHORT, lora_name="late")).outputs


async def test_a_request_whose_adapter_was_on_its_way_when_the_session_broke_goes_on(
    tiny_model_directory: Path, adapters: Path, gate: Gate
) -> None:
    async with serving(tiny_model_directory, adapters) as (one, _), Client(one.target) as client:
        task = asyncio.create_task(collect(client, "abc", SHORT, lora_name="two"))
        await until(lambda: gate.num_waiting == 1)
        one.engine.adapters.fetchers[0].end(WorkerError("the session is over"))
        await until(lambda: gate.num_waiting == 2)
        gate.is_open.set()
        assert len((await task).outputs[0].token_ids) == 8


async def test_a_request_that_waits_for_an_adapter_is_told_why_no_worker_can_use_it(
    tiny_model_directory: Path, tmp_path: Path, gate: Gate
) -> None:
    folder = tmp_path / "adapters"
    write_adapter(folder / "high", 1, rank=17)
    async with serving(tiny_model_directory, folder) as (one, worker), Client(one.target) as client:
        refused = asyncio.create_task(refusal(client, "high"))
        await until(lambda: gate.num_waiting == 1 and len(one.engine.requests.in_flight) == 1)
        gate.is_open.set()
        code, reason = await refused
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "the adapter high cannot be used" in reason
        assert "rank 17" in reason
        assert (await refusal(client, "high"))[0] is grpc.StatusCode.NOT_FOUND
        assert (await collect(client, "abc", SHORT)).outputs
        assert not worker.worker.adapters.fingerprints


async def test_an_adapter_that_no_worker_can_use_costs_none_its_session(
    tiny_model_directory: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapters"
    write_adapter(folder / "high", 1, rank=8)
    async with (
        worker_in_process(tiny_model_directory, max_loras=1, max_lora_rank=4) as first,
        worker_in_process(tiny_model_directory, max_loras=1, max_lora_rank=4) as second,
        scheduler(first.address, second.address, model=str(tiny_model_directory), lora_dir=folder) as one,
        Client(one.target) as client,
    ):
        await until(lambda: len(one.engine.workers.serving) == 2 and not one.engine.adapters.catalogue.listed)
        assert (await refusal(client, "high"))[0] is grpc.StatusCode.NOT_FOUND
        assert (await collect(client, "abc", SHORT)).outputs
        assert sum(worker.num_losses for worker in one.engine.workers.all) == 0


async def test_only_one_worker_is_brought_an_adapter_that_one_request_needs(
    tiny_model_directory: Path, adapters: Path
) -> None:
    """And the next request of it goes to the worker that holds it."""
    async with (
        worker_in_process(tiny_model_directory, max_loras=1, max_cpu_loras=1) as first,
        worker_in_process(tiny_model_directory, max_loras=1, max_cpu_loras=1) as second,
        scheduler(first.address, second.address, model=str(tiny_model_directory), lora_dir=adapters) as one,
        Client(one.target) as client,
    ):
        await until(lambda: len(one.engine.workers.serving) == 2)
        for name in ("three", "two", "two", "two", "three", "three"):
            await collect(client, "abc", SHORT, lora_name=name)
        brought = [worker.fetch_counts.num_adapters for worker in one.engine.workers.all]
        # Each has brought the first one by itself, and then two and three lie on one worker each.
        assert sum(brought) <= 2 + 3
        assert all(len(worker.worker.adapters.fingerprints) == 1 for worker in (first, second))


async def test_one_that_is_unloaded_on_its_way_is_forgotten(
    tiny_model_directory: Path, tmp_path: Path, gate: Gate
) -> None:
    folder = write_three(tmp_path / "adapters")
    async with serving(tiny_model_directory, folder) as (one, worker), Client(one.target) as client:
        await until(lambda: gate.num_waiting == 1)
        (fetcher,) = one.engine.adapters.fetchers
        first = next(
            adapter for adapter in one.engine.adapters.catalogue.listed if adapter.fingerprint == fetcher.fetching
        )
        async with Admin(one.admin_target) as admin:
            await admin.unload_adapter(first.name)
        await until(lambda: gate.num_waiting == 2)
        gate.is_open.set()
        held = worker.worker.adapters
        await until(lambda: len(held.fingerprints) == 2)
        assert first.fingerprint not in held.fingerprints
        assert (await refusal(client, first.name))[0] is grpc.StatusCode.NOT_FOUND
        assert one.engine.workers.all[0].num_losses == 0


async def test_what_a_worker_held_before_and_nothing_names_any_more_is_forgotten(
    tiny_model_directory: Path, adapters: Path, tmp_path: Path
) -> None:
    other = tmp_path / "others"
    write_adapter(other / "other", 9)
    (adapters / "one").rename(other / "one")
    model = str(tiny_model_directory)
    async with worker_in_process(tiny_model_directory, max_loras=4) as worker:
        held = worker.worker.adapters
        for folder, number in ((adapters, 2), (other, 2)):
            async with scheduler(worker.address, model=model, lora_dir=folder) as one:
                wanted = one.engine.adapters.catalogue.fingerprints
                await until(lambda wanted=wanted: set(held.fingerprints) == set(wanted))  # type: ignore[misc]
                assert len(wanted) == number


async def test_the_first_token_of_an_adapter_that_has_to_come_waits_for_no_other_step(
    tiny_model_directory: Path, adapters: Path, gate: Gate
) -> None:
    """Streams that run gain tokens all the while."""
    async with serving(tiny_model_directory, adapters) as (one, _), Client(one.target) as client:
        stream = client.generate("abc", LONG)
        await anext(stream)
        task = asyncio.create_task(collect(client, "abc", SHORT, lora_name="two"))
        await until(lambda: gate.num_waiting == 1)
        num_steps = one.engine.workers.all[0].num_steps
        async for _ in stream:
            pass
        assert one.engine.workers.all[0].num_steps >= num_steps + 50
        gate.is_open.set()
        began = time.monotonic()
        await task
        assert time.monotonic() - began < 60


async def test_an_adapter_whose_copy_is_gone_costs_its_own_requests_alone(
    tiny_model_directory: Path, adapters: Path
) -> None:
    """As where a folder for temporary files is cleaned up."""
    async with serving(tiny_model_directory, adapters, max_cpu_loras=1) as (one, worker), Client(one.target) as client:
        held = worker.worker.adapters
        await until(lambda: len(held.fingerprints) == 1)
        gone = next(
            adapter for adapter in one.engine.adapters.catalogue.listed if adapter.fingerprint not in held.fingerprints
        )
        gone.weights.unlink()
        code, reason = await refusal(client, gone.name)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "the scheduler's copy of it cannot be read: No such file or directory" in reason
        assert (await refusal(client, gone.name))[0] is grpc.StatusCode.NOT_FOUND
        for adapter in one.engine.adapters.catalogue.listed:
            assert (await collect(client, "abc", SHORT, lora_name=adapter.name)).outputs
        assert one.engine.workers.all[0].num_losses == 0
        async with Admin(one.admin_target) as admin:
            await admin.load_adapter(gone.name)
        assert (await collect(client, "abc", SHORT, lora_name=gone.name)).outputs


async def test_copies_of_adapters_lie_about_only_while_they_are_needed(
    tiny_model_directory: Path, adapters: Path, gate: Gate
) -> None:
    gate.is_open.set()
    async with serving(tiny_model_directory, adapters) as (one, _):
        (copies,) = {adapter.weights.parent for adapter in one.engine.adapters.catalogue.listed}
        async with Admin(one.admin_target) as admin:
            for _ in range(3):
                await admin.load_adapter("one")  # the same again
            write_adapter(adapters / "broken", 1, rank=17)
            with pytest.raises(grpc.aio.AioRpcError, match="rank 17"):
                await admin.load_adapter("broken")
            assert {copy.name for copy in copies.iterdir()} == set(one.engine.adapters.catalogue.fingerprints)
            gate.is_open.clear()
            write_adapter(adapters / "late", 5)
            load = asyncio.create_task(admin.load_adapter("late"))
            await until(lambda: one.engine.adapters.fetchers[0].fetching != "" and len(list(copies.iterdir())) == 4)
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
            await until(lambda: len(list(copies.iterdir())) == 3)
            await admin.unload_adapter("one")
        assert len(list(copies.iterdir())) == 2


async def test_many_requests_of_one_adapter_that_is_on_its_way_hold_up_nothing(
    tiny_model_directory: Path, adapters: Path, gate: Gate
) -> None:
    async with serving(tiny_model_directory, adapters) as (one, _), Client(one.target) as client:
        named = [asyncio.create_task(collect(client, "abc", SHORT, lora_name="two")) for _ in range(100)]
        await until(lambda: gate.num_waiting == 1 and len(one.engine.requests.in_flight) == 100)
        assert (await collect(client, "abc", SHORT)).outputs
        assert not any(task.done() for task in named)
        gate.is_open.set()
        assert len({tuple((await task).outputs[0].token_ids) for task in named}) == 1


async def test_one_that_is_wanted_again_at_once_comes_all_the_same(
    tiny_model_directory: Path, adapters: Path, gate: Gate
) -> None:
    """What was given up is brought anew, and the worker goes on."""
    async with serving(tiny_model_directory, adapters) as (one, worker), Client(one.target) as client:
        await until(lambda: gate.num_waiting == 1)
        held, (fetcher,) = one.engine.adapters, one.engine.adapters.fetchers
        adapter = next(adapter for adapter in held.catalogue.listed if adapter.fingerprint == fetcher.fetching)
        del held.catalogue.named[adapter.name]
        held._update()
        held.catalogue.named[adapter.name] = adapter
        held._update()
        gate.is_open.set()
        assert (await collect(client, "abc", SHORT, lora_name=adapter.name)).outputs
        await until(lambda: len(worker.worker.adapters.fingerprints) == 3)
        assert one.engine.workers.all[0].num_losses == 0


async def test_a_worker_that_takes_no_adapter_for_a_while_serves_all_else(
    tiny_model_directory: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose disk is full. Requests of adapters wait until it does again."""
    monkeypatch.setattr(adapter_fetcher, "LAST_RETRY_SECONDS", 0.1)
    is_full, num_calls = True, 0

    async def take(worker: Any, device_thread: Any, pieces: AsyncIterator[Any]) -> None:
        nonlocal num_calls
        num_calls += 1
        if is_full:
            raise OSError(28, "No space left on device")
        await load_adapter(worker, device_thread, pieces)

    monkeypatch.setattr(servicer, "load_adapter", take)
    async with serving(tiny_model_directory, adapters) as (one, _), Client(one.target) as client:
        named = asyncio.create_task(collect(client, "abc", SHORT, lora_name="two"))
        await until(lambda: num_calls >= 6)  # each has been tried, and again
        assert (await collect(client, "abc", SHORT)).outputs
        assert not named.done()
        is_full = False
        assert (await named).outputs
        assert one.engine.workers.all[0].num_losses == 0


async def test_one_that_takes_long_on_its_way_to_a_worker_is_brought_to_another(
    tiny_model_directory: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (adapter_fetcher, catalogue):
        monkeypatch.setattr(module, "LONG_FETCH_SECONDS", 0.1)
    begun = asyncio.Event()

    async def take(worker: Any, device_thread: Any, pieces: AsyncIterator[Any]) -> None:
        if not begun.is_set():
            begun.set()
            await asyncio.Event().wait()
        await load_adapter(worker, device_thread, pieces)

    monkeypatch.setattr(servicer, "load_adapter", take)
    async with (
        worker_in_process(tiny_model_directory, max_loras=1, max_cpu_loras=1) as first,
        worker_in_process(tiny_model_directory, max_loras=1, max_cpu_loras=1) as second,
        scheduler(first.address, second.address, model=str(tiny_model_directory), lora_dir=adapters) as one,
        Client(one.target) as client,
    ):
        await begun.wait()
        await until(lambda: len(one.engine.workers.serving) == 2)
        stuck = next(fetcher for fetcher in one.engine.adapters.fetchers if fetcher.fetching)
        name = next(one.name for one in one.engine.adapters.catalogue.listed if one.fingerprint == stuck.fetching)
        assert (await collect(client, "abc", SHORT, lora_name=name)).outputs


async def test_a_worker_with_other_adapters_than_are_counted_is_asked_again(
    tiny_model_directory: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session ends, nothing is blamed, and no adapter is taken for unusable."""
    has_place = False

    async def take(worker: Any, device_thread: Any, pieces: AsyncIterator[Any]) -> None:
        if not has_place:
            async for _ in pieces:
                pass
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "this worker holds 7 adapters")
        await load_adapter(worker, device_thread, pieces)

    monkeypatch.setattr(servicer, "load_adapter", take)
    async with serving(tiny_model_directory, adapters) as (one, worker), Client(one.target) as client:
        await until(lambda: "this worker holds 7 adapters" in one.engine.workers.all[0].last_error)
        has_place = True
        assert (await collect(client, "abc", SHORT, lora_name="two")).outputs
        await until(lambda: len(worker.worker.adapters.fingerprints) == 3)
        assert len(one.engine.adapters.catalogue.listed) == 3


async def test_one_that_is_to_be_tried_again_and_has_no_place_is_not_looked_at_all_the_time(
    tiny_model_directory: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_fetcher, "LAST_RETRY_SECONDS", 0.01)
    async with serving(tiny_model_directory, adapters, max_cpu_loras=1) as (one, worker), Client(one.target) as client:
        await until(lambda: len(worker.worker.adapters.fingerprints) == 1)
        held = worker.worker.adapters.fingerprints[0]
        (fetcher,) = one.engine.adapters.fetchers
        fetcher._retry_later(next(one for one in one.engine.adapters.catalogue.fingerprints if one != held), "made up")
        await asyncio.wait_for(asyncio.shield(until(lambda: fetcher._pause() is None)), 5)
        assert (await collect(client, "abc", SHORT)).outputs
