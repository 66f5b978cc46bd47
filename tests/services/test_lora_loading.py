"""Adapters come and go while requests run: none is lost, applied by mistake, or dropped too early."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from engines import until
from lora_helpers import LONG, refusal, serving
from ports import free_port
from scheduler_in_process import scheduler
from tiny_adapters import write_adapter
from worker_in_process import slow_down, worker_in_process

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client, SamplingParams
from pagewire_client.admin import Admin
from pagewire_client.llm import collect
from pagewire_common.start_error import StartError
from scheduler_service.access.keys import ApiKey, Keyring, digest_of
from scheduler_service.engine.adapters.adapter_files import hand_over, read_adapter
from scheduler_service.engine.sessions import worker_loop
from scheduler_service.engine.worker_link.client import WorkerClient
from scheduler_service.engine.worker_link.errors import AdapterFailedError
from scheduler_service.frontend.calls import generation
from scheduler_service.frontend.output.request import GenerationRequest
from scheduler_service.wire.codec import WorkerInfo
from worker_service.serving import servicer
from worker_service.serving.adapters import load_adapter


async def test_adapters_are_loaded_and_unloaded_while_requests_run(tiny_model_directory: Path, tmp_path: Path) -> None:
    """One that is unloaded is freed when the last request that names it has ended; until then that goes on."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    sampling = SamplingParams(max_tokens=300, ignore_eos=True, temperature=0)
    async with serving(tiny_model_directory, folder) as (one, worker), Client(one.target) as client:
        held = worker.worker.adapters
        async with Admin(one.admin_target) as admin:
            assert await refusal(client, "late") == (
                grpc.StatusCode.NOT_FOUND,
                "lora_name: there is no adapter 'late'",
            )
            write_adapter(folder / "late", 5)
            loaded = await admin.load_adapter("late")
            assert (await admin.load_adapter("late")).fingerprint == loaded.fingerprint  # twice is no error
            assert [adapter.name for adapter in await admin.adapters()] == ["late"]
            await until(lambda: one.link.adapter_names == ("late",))
            assert list((await client.get_model()).lora_names) == ["late"]
            assert held.fingerprints == [loaded.fingerprint]
            whole = await collect(client, "abc", sampling, lora_name="late")
            stream = client.generate("abc", sampling, lora_name="late")
            first = await anext(stream)
            await admin.unload_adapter("late")
            assert not await admin.adapters()
            assert (await refusal(client, "late"))[0] is grpc.StatusCode.NOT_FOUND
            rest = [token_id async for response in stream for token_id in response.token_ids]
            assert [*first.token_ids, *rest] == whole.outputs[0].token_ids
            await until(lambda: not held.fingerprints)
            await until(lambda: not one.link.adapter_names)
            with pytest.raises(grpc.aio.AioRpcError, match="there is no adapter 'late'"):
                await admin.unload_adapter("late")


async def test_a_name_may_come_to_mean_another_adapter(tiny_model_directory: Path, tmp_path: Path) -> None:
    """Requests in flight keep the one that they named, and a stream that broke does not go on with the other."""
    folder = tmp_path / "adapters"
    write_adapter(folder / "same", 1)
    sampling = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0)
    async with serving(tiny_model_directory, folder) as (one, worker), Client(one.target, retry_for=0) as client:
        old = await collect(client, "abc", sampling, lora_name="same")
        stream = client.generate("abc", sampling, lora_name="same", request_id="r")
        first = await anext(stream)
        (folder / "same").rename(tmp_path / "old")
        write_adapter(folder / "same", 2)
        async with Admin(one.admin_target) as admin:
            await admin.load_adapter("same")
        new = await collect(client, "abc", sampling, lora_name="same")
        rest = [token_id async for response in stream for token_id in response.token_ids]
        assert [*first.token_ids, *rest] == old.outputs[0].token_ids != new.outputs[0].token_ids
        await until(lambda: len(worker.worker.adapters.fingerprints) == 1)
        resumed = pb.GenerateRequest(text="abc", lora_name="same", sampling=sampling)
        resumed.resume.model_fingerprint = first.model_fingerprint
        with pytest.raises(grpc.aio.AioRpcError, match="this server serves another model") as error:
            await client._stub.Generate(resumed).read()
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION


BROKEN = {
    "no folder": (lambda folder: None, "cannot read"),
    "no weights": (lambda folder: (write_adapter(folder, 1) / "adapter_model.safetensors").unlink(), "cannot read"),
    "too high a rank": (lambda folder: write_adapter(folder, 1, rank=17), "rank 17"),
    "a pickle by its name": (
        lambda folder: (write_adapter(folder, 1) / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
        "its weights are a pickle, adapter_model.bin",
    ),
    "a pickle": (lambda folder: torch.save({}, write_adapter(folder, 1) / "adapter_model.safetensors"), "safetensors"),
    "too large": (
        lambda folder: (write_adapter(folder, 1) / "adapter_model.safetensors").write_bytes(bytes(20 << 20)),
        "has more than",
    ),
    "a large configuration": (
        lambda folder: (write_adapter(folder, 1) / "adapter_config.json").write_bytes(bytes(2 << 20)),
        "more than 1048576 bytes",
    ),
}


@pytest.mark.parametrize(("write", "sentence"), BROKEN.values(), ids=BROKEN)
async def test_an_adapter_that_cannot_be_used_is_refused_and_nothing_else_is_touched(
    write: Any, sentence: str, tiny_model_directory: Path, adapters: Path
) -> None:
    async with serving(tiny_model_directory, adapters) as (one, worker), Client(one.target) as client:
        write(adapters / "broken")
        async with Admin(one.admin_target) as admin:
            with pytest.raises(grpc.aio.AioRpcError, match=sentence) as error:
                await admin.load_adapter("broken")
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert len(await admin.adapters()) == 3
        assert (await refusal(client, "broken"))[0] is grpc.StatusCode.NOT_FOUND
        assert (await collect(client, "a", SamplingParams(max_tokens=1), lora_name="one")).outputs
        await until(lambda: len(worker.worker.adapters.fingerprints) == 3)
        assert one.engine.workers.all[0].num_losses == 0


@pytest.mark.parametrize("name", ["", "..", ".", "../adapters", "/etc", "a/b", "x" * 129, "a\nb"])
async def test_a_name_leads_nowhere_but_into_the_folder(name: str, tiny_model_directory: Path, adapters: Path) -> None:
    async with serving(tiny_model_directory, adapters) as (one, _), Admin(one.admin_target) as admin:
        with pytest.raises(grpc.aio.AioRpcError, match="cannot name an adapter"):
            await admin.load_adapter(name)


async def test_an_adapter_that_the_first_worker_refuses_is_not_served(
    tiny_model_directory: Path, adapters: Path
) -> None:
    write_adapter(adapters / "high", 1, rank=17)
    async with serving(tiny_model_directory, adapters) as (one, _), Client(one.target) as client:
        await until(lambda: len(one.engine.adapters.catalogue.listed) == 3)
        assert (await refusal(client, "high"))[0] is grpc.StatusCode.NOT_FOUND
        assert (await collect(client, "a", SamplingParams(max_tokens=1), lora_name="one")).outputs


async def test_a_worker_without_room_for_adapters_is_not_used_beside_them(
    tiny_model_directory: Path, adapters: Path
) -> None:
    async with (
        worker_in_process(tiny_model_directory) as worker,
        scheduler(worker.address, model=str(tiny_model_directory), lora_dir=adapters) as one,
    ):
        await until(lambda: "start it with --max-loras" in one.engine.workers.all[0].last_error)


async def test_an_adapter_that_is_not_there_is_said_at_start(tiny_model_directory: Path, tmp_path: Path) -> None:
    settings: list[tuple[dict[str, Any], str]] = [
        ({"lora_modules": ["a=/nowhere"]}, "adapter a: cannot read"),
        ({"lora_modules": ["a"]}, "it must be NAME=FOLDER"),
        ({"lora_dir": tmp_path / "typo"}, "--lora-dir: there is no folder"),
    ]
    for named, sentence in settings:
        with pytest.raises(StartError, match=sentence):
            async with scheduler("127.0.0.1:1", model=str(tiny_model_directory), **named):
                pass


@pytest.mark.parametrize("way", ["left", "stopped"])
async def test_an_adapter_is_dropped_only_when_no_step_in_flight_can_need_it(
    way: str, tiny_model_directory: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    async with serving(tiny_model_directory, folder) as (one, worker), Client(one.target) as client:
        slow_down(worker, 0.02)
        beside = asyncio.create_task(collect(client, "x", LONG))
        async with Admin(one.admin_target) as admin:
            for number in range(3):
                write_adapter(folder / str(number), number)
                await admin.load_adapter(str(number))
                whole = await collect(client, "abc", SamplingParams(max_tokens=9, temperature=0), lora_name=str(number))
                stop = [whole.outputs[0].text[3:6]] if way == "stopped" else []
                sampling = SamplingParams(max_tokens=150, ignore_eos=True, temperature=0, stop=stop)
                stream = client.generate("abc", sampling, lora_name=str(number))
                await anext(stream)
                await admin.unload_adapter(str(number))
                if way == "stopped":
                    assert [message async for message in stream]
                await stream.aclose()
        await until(lambda: not worker.worker.adapters.fingerprints)
        assert len((await beside).outputs[0].token_ids) == 150
        assert one.engine.workers.all[0].num_losses == 0


async def test_a_scheduler_that_has_lost_a_worker_to_another_leaves_its_adapters_alone(
    tiny_model_directory: Path, adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_loop, "LONG_RETRY_SECONDS", 0.2)
    (tmp_path / "none").mkdir()
    model = str(tiny_model_directory)
    async with (
        worker_in_process(tiny_model_directory, max_loras=4) as worker,
        scheduler(worker.address, model=model, lora_dir=tmp_path / "none") as older,
    ):
        await until(lambda: older.engine.workers.admits)
        async with Client(older.target) as client:
            await collect(client, "a", SamplingParams(max_tokens=1))
        async with scheduler(worker.address, model=model, lora_dir=adapters) as newer, Client(newer.target) as client:
            await until(lambda: newer.engine.workers.admits)
            attempts: list[int] = []
            get_info = older.engine.workers.all[0].client.get_info

            async def counted() -> WorkerInfo:
                attempts.append(len(attempts))
                return await get_info()

            monkeypatch.setattr(older.engine.workers.all[0].client, "get_info", counted)
            for number in range(3):
                assert (await collect(client, "a", SamplingParams(max_tokens=1), lora_name="one")).outputs
                await until(lambda number=number: len(attempts) > number)  # type: ignore[misc]
            assert len(worker.worker.adapters.fingerprints) == 3
            assert newer.engine.workers.all[0].num_losses == 0


async def test_a_worker_that_cannot_use_what_others_can_is_not_used(tiny_model_directory: Path, tmp_path: Path) -> None:
    """And a folder that was replaced meanwhile does not matter to one that joins."""
    folder, late = tmp_path / "adapters", f"127.0.0.1:{free_port()}"
    write_adapter(folder / "a", 1, rank=8)
    async with (
        worker_in_process(tiny_model_directory, max_loras=4) as first,
        scheduler(first.address, late, model=str(tiny_model_directory), lora_dir=folder) as one,
        Client(one.target) as client,
    ):
        await until(lambda: one.engine.workers.admits)
        (folder / "a").rename(tmp_path / "gone")
        async with worker_in_process(tiny_model_directory, listen=late, max_loras=4, max_lora_rank=4):
            await until(lambda: any("rank 8" in loop.last_error for loop in one.engine.workers.all))
        async with worker_in_process(tiny_model_directory, listen=late, max_loras=4) as second:
            await until(lambda: len(one.engine.workers.serving) == 2)
            assert second.worker.adapters.fingerprints == first.worker.adapters.fingerprints
        assert (await collect(client, "a", SamplingParams(max_tokens=1), lora_name="a")).outputs


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once a worker begins to take an adapter, which it never ends."""
    begun = asyncio.Event()

    async def take(*_: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(servicer, "load_adapter", take)
    return begun


async def test_a_load_that_is_cut_off_changes_nothing(
    tiny_model_directory: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch, stuck: asyncio.Event
) -> None:
    """What was on its way is given up, and does not hold up what comes after it."""
    with monkeypatch.context() as before:
        before.setattr(servicer, "load_adapter", load_adapter)
        async with serving(tiny_model_directory, adapters) as (one, worker), Client(one.target) as client:
            held, fetcher = worker.worker.adapters, one.engine.adapters.fetchers[0]
            await until(lambda: len(held.fingerprints) == 3)
            before.undo()
            write_adapter(adapters / "late", 5)
            async with Admin(one.admin_target) as admin:
                load = asyncio.create_task(admin.load_adapter("late"))
                await stuck.wait()
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
                await until(lambda: not fetcher.fetching)
                assert [adapter.name for adapter in one.engine.adapters.catalogue.listed] == ["one", "three", "two"]
                before.setattr(servicer, "load_adapter", load_adapter)
                await admin.load_adapter("late")
            assert len(held.fingerprints) == 4
            assert (await collect(client, "abc", SamplingParams(max_tokens=2), lora_name="late")).outputs
            assert one.engine.workers.all[0].num_losses == 0


async def test_a_connection_that_is_closed_ends_what_is_handed_over(
    tiny_model_directory: Path, adapters: Path, tmp_path: Path, stuck: asyncio.Event
) -> None:
    """It is not taken for a cancelled call of an operator."""
    adapter = read_adapter("one", adapters / "one", tmp_path)
    async with worker_in_process(tiny_model_directory, max_loras=4) as worker:
        client = WorkerClient(worker.address)
        handing = asyncio.create_task(hand_over(client, adapter))
        await stuck.wait()
        await client.reconnect()
        with pytest.raises(AdapterFailedError):
            await handing
        await client.close()


async def test_a_request_that_is_being_checked_when_its_adapter_breaks_is_refused_alone(
    tiny_model_directory: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, held = asyncio.Event(), asyncio.Event()
    real = generation.check_request

    async def slowly(*arguments: Any) -> GenerationRequest:
        begun.set()
        await held.wait()
        return await real(*arguments)

    async with serving(tiny_model_directory, adapters) as (one, _), Client(one.target) as client:
        monkeypatch.setattr(generation, "check_request", slowly)
        refused = asyncio.create_task(refusal(client, "one"))
        await begun.wait()
        one.engine.adapters.give_up(one.engine.adapters.catalogue.listed[0], "it was tried")
        held.set()
        assert (await refused)[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert (await collect(client, "a", SamplingParams(max_tokens=1), lora_name="two")).outputs
        assert one.engine.workers.all[0].num_losses == 0


async def test_a_key_is_told_of_the_adapters_that_it_may_name(tiny_model_directory: Path, adapters: Path) -> None:
    key = ApiKey(id="some", digest=digest_of("a key"), tenant="", adapters=frozenset({"two", "none"}))
    async with (
        worker_in_process(tiny_model_directory, max_loras=4) as worker,
        scheduler(worker.address, model=str(tiny_model_directory), lora_dir=adapters, keyring=Keyring([key])) as one,
        Client(one.target, api_key="a key") as client,
    ):
        assert list((await client.get_model()).lora_names) == ["two"]
