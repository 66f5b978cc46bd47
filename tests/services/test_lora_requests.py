"""Requests that name low-rank adapters: their tokens are the same whatever happens, and names come and go."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from engines import until
from safetensors.torch import save_file
from scheduler_in_process import InProcess, scheduler
from test_processes import free_port
from worker_in_process import ServedWorker, worker_in_process

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.admin_service_pb2 import FinishedRequest
from pagewire_client import Client, SamplingParams
from pagewire_client.admin import Admin
from pagewire_client.llm import collect
from pagewire_common.start_error import StartError
from scheduler_service.access.keys import ApiKey, Keyring, digest_of
from scheduler_service.engine import worker_loop
from scheduler_service.engine.adapters import MOST_COUNTED, OTHERS, AdapterCounts, pieces_of, read_adapter
from scheduler_service.engine.worker_client import UnreachableError, WorkerClient
from scheduler_service.recording.replayer import Replayer
from scheduler_service.wire.codec import WorkerInfo
from worker_service.serving import servicer
from worker_service.serving.adapters import load_adapter
from worker_service.speculation import drafter

PROMPTS = ["abcabcabcabc", "one two three one two three", "x" * 40]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.8, "seed": 5},
    "several": {"n": 3, "temperature": 0.6, "seed": 7},
    "penalized": {"temperature": 0, "repetition_penalty": 1.05},
    "reported": {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    "beams": {"beam_width": 2, "n": 2},
}
SIZES = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (32, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}


def write_adapter(folder: Path, seed: int, rank: int = 4) -> Path:
    """For the tiny model, as PEFT writes one."""
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer, (name, (outputs, inputs)) in product(range(2), SIZES.items()):
        module = f"base_model.model.model.layers.{layer}.{name}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw) * 0.3
        tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(SIZES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_three(folder: Path) -> Path:
    for number, name in enumerate(("one", "two", "three")):
        write_adapter(folder / name, number, rank=2 + 3 * number)
    return folder


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    """A folder of three."""
    return write_three(tmp_path / "adapters")


@asynccontextmanager
async def serving(
    model: Path, lora_dir: Path, recording: Path | None = None, **settings: Any
) -> AsyncIterator[tuple[InProcess, ServedWorker]]:
    """A worker of four slots, and a scheduler."""
    async with (
        worker_in_process(model, **{"max_loras": 4} | settings) as worker,
        scheduler(worker.address, model=str(model), lora_dir=lora_dir, preemption_mode="swap", record=recording) as one,
    ):
        await until(lambda: one.engine.admits)
        yield one, worker


Shown = list[tuple[list[int], str, list[list[int]]]]


async def outputs(client: Client, prompt: str, lora_name: str, **sampling: Any) -> Shown:
    """Tokens, text, and which tokens were likeliest."""
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | sampling)
    completion = await collect(client, prompt, params, lora_name=lora_name)
    return [
        (output.token_ids, output.text, [[top.token_id for top in position.top] for position in output.logprobs])
        for output in completion.outputs
    ]


Asked = tuple[str, str, dict[str, Any]]
NAMES = ("", "one", "two", "three")
ASKED: list[Asked] = list(product(PROMPTS, NAMES, KINDS.values()))


@pytest.fixture(scope="module")
def alone(tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shown]:
    """What each of ASKED says when there is nothing beside it."""

    async def run() -> dict[str, Shown]:
        folder = write_three(tmp_path_factory.mktemp("adapters"))
        async with serving(tiny_model_directory, folder) as (one, _), Client(one.target) as client:
            return {str(asked): await outputs(client, asked[0], asked[1], **asked[2]) for asked in ASKED}

    return asyncio.run(run())


async def all_together(client: Client, asked: list[Asked]) -> list[Shown]:
    return await asyncio.gather(*(outputs(client, prompt, name, **sampling) for prompt, name, sampling in asked))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_device_blocks": 48},
        {"max_loras": 1},
        {"speculate": "ngram"},
        {"speculate": "draft"},
    ],
    ids=["together", "swapped", "one slot", "n-grams", "draft model"],
)
async def test_outputs_of_adapters_are_the_same_alone_and_together(
    settings: dict[str, Any],
    tiny_model_directory: Path,
    adapters: Path,
    alone: dict[str, Shown],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And every decision can be replayed. All guesses are verified."""
    monkeypatch.setattr(drafter, "numbers_of_guesses", lambda chances, most, *_, **__: [most] * len(chances))
    if settings.get("speculate") == "draft":
        settings = settings | {"draft_model": str(tiny_model_directory)}
    expected = list(alone.values())
    assert len({str(alone[str((PROMPTS[0], name, KINDS["greedy"]))]) for name in NAMES}) == 4
    recording = tmp_path / "recording"
    async with serving(tiny_model_directory, adapters, recording, **settings) as (one, _):
        async with Client(one.target) as client:
            assert await all_together(client, ASKED) == expected
        await until(lambda: not one.engine.requests)
        counts, each = one.engine.adapters.counts, len(ASKED) // len(NAMES)
        assert counts.num_requests == {"one": each, "two": each, "three": each}
        assert counts.num_output_tokens["one"] == len(PROMPTS) * 24 * (4 + 3 + 2)
        (worker,) = one.engine.workers
        assert worker.scheduler is not None
        assert sum(worker.scheduler.num_preemptions.values()) > 0 or "num_device_blocks" not in settings
        assert worker.guesses.num_verified > 0 or "speculate" not in settings
    assert sum(1 for _ in Replayer().run(recording)) > 100


async def test_outputs_of_adapters_are_the_same_when_their_worker_is_lost(
    tiny_model_directory: Path, adapters: Path, alone: dict[str, Shown]
) -> None:
    asked = [one for one in ASKED if "beam_width" not in one[2]] * 3
    expected = [alone[str(one)] for one in asked]
    async with (
        worker_in_process(tiny_model_directory, max_loras=4) as first,
        worker_in_process(tiny_model_directory, max_loras=2) as second,
        scheduler(first.address, second.address, model=str(tiny_model_directory), lora_dir=adapters) as one,
    ):
        await one.engine.model()
        await until(lambda: len(one.engine.serving) == 2)
        (lost,) = [worker for worker in one.engine.workers if worker.client.address == first.address]
        async with Client(one.target) as client:
            together = asyncio.create_task(all_together(client, asked))
            await until(lambda: lost.num_steps > 20)
            await first.server.server.stop(None)
            assert await together == expected
        assert lost.num_losses == 1


async def refusal(client: Client, lora_name: str, **about: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await collect(client, "a", SamplingParams(max_tokens=1), lora_name=lora_name, **about)
    return error.value.code(), str(error.value.details())


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
        assert len(worker.worker.adapters.fingerprints) == 3
        assert one.engine.workers[0].num_losses == 0


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
        assert (await refusal(client, "high"))[0] is grpc.StatusCode.NOT_FOUND
        assert (await collect(client, "a", SamplingParams(max_tokens=1), lora_name="one")).outputs


async def test_a_worker_without_room_for_adapters_is_not_used_beside_them(
    tiny_model_directory: Path, adapters: Path
) -> None:
    async with (
        worker_in_process(tiny_model_directory) as worker,
        scheduler(worker.address, model=str(tiny_model_directory), lora_dir=adapters) as one,
    ):
        await until(lambda: "start it with --max-loras" in one.engine.workers[0].last_error)


async def test_an_adapter_that_is_not_there_is_said_at_start(tiny_model_directory: Path, tmp_path: Path) -> None:
    settings: list[tuple[dict[str, Any], str]] = [
        ({"lora": ["a=/nowhere"]}, "adapter a: cannot read"),
        ({"lora": ["a"]}, "it must be NAME=FOLDER"),
        ({"lora_dir": tmp_path / "typo"}, "--lora-dir: there is no folder"),
    ]
    for named, sentence in settings:
        with pytest.raises(StartError, match=sentence):
            async with scheduler("127.0.0.1:1", model=str(tiny_model_directory), **named):
                pass


async def test_a_key_may_name_some_adapters_alone(tiny_model_directory: Path, adapters: Path) -> None:
    """Whether or not others are there."""
    key = ApiKey(id="one", digest=digest_of("secret"), tenant="t", adapters=frozenset({"one", "gone"}))
    async with (
        worker_in_process(tiny_model_directory, max_loras=4) as worker,
        scheduler(worker.address, model=str(tiny_model_directory), lora_dir=adapters, keyring=Keyring([key])) as one,
        Client(one.target, api_key="secret") as client,
    ):
        await until(lambda: one.engine.admits)
        for name in ("", "one"):
            assert (await collect(client, "a", SamplingParams(max_tokens=1), lora_name=name)).outputs
        for name in ("two", "nowhere"):
            assert (await refusal(client, name))[0] is grpc.StatusCode.PERMISSION_DENIED
        assert (await refusal(client, "gone"))[0] is grpc.StatusCode.NOT_FOUND


async def test_many_adapters_share_few_slots(tiny_model_directory: Path, tmp_path: Path) -> None:
    """As many as 200 with arrivals by Zipf's law: every request ends, and each says what it says alone."""
    folder, draw = tmp_path / "adapters", random.Random(1)
    names = [f"a{number}" for number in range(200)]
    for number, name in enumerate(names):
        write_adapter(folder / name, number, rank=1 + number % 4)
    chosen = draw.choices(names, [1 / rank for rank in range(1, 201)], k=300)
    sampling = {"temperature": 0, "max_tokens": 6}
    asked: list[Asked] = [(f"{number} ", name, sampling) for number, name in enumerate(chosen)]
    async with serving(tiny_model_directory, folder) as (one, worker), Client(one.target) as client:
        assert len(worker.worker.adapters.fingerprints) == 200
        together = await all_together(client, asked)
        for (prompt, name, _), found in list(zip(asked, together, strict=True))[::5]:
            assert await outputs(client, prompt, name, **sampling) == found
        assert len(worker.worker.adapters._slots) == 4


def slow_down(worker: ServedWorker, seconds: float) -> None:
    """Each step of it takes so long."""
    runner, launch = worker.worker.runner, worker.worker.runner.launch

    def slowly(*arguments: Any) -> Any:
        time.sleep(seconds)
        return launch(*arguments)

    runner.launch = slowly  # type: ignore[method-assign]


LONG = SamplingParams(max_tokens=150, ignore_eos=True, temperature=0)


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
        assert one.engine.workers[0].num_losses == 0


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
        await until(lambda: older.engine.admits)
        async with Client(older.target) as client:
            await collect(client, "a", SamplingParams(max_tokens=1))
        async with scheduler(worker.address, model=model, lora_dir=adapters) as newer, Client(newer.target) as client:
            await until(lambda: newer.engine.admits)
            attempts: list[int] = []
            get_info = older.engine.workers[0].client.get_info

            async def counted() -> WorkerInfo:
                attempts.append(len(attempts))
                return await get_info()

            monkeypatch.setattr(older.engine.workers[0].client, "get_info", counted)
            for number in range(3):
                assert (await collect(client, "a", SamplingParams(max_tokens=1), lora_name="one")).outputs
                await until(lambda number=number: len(attempts) > number)  # type: ignore[misc]
            assert len(worker.worker.adapters.fingerprints) == 3
            assert newer.engine.workers[0].num_losses == 0


async def test_a_worker_that_cannot_use_what_others_can_is_not_used(tiny_model_directory: Path, tmp_path: Path) -> None:
    """And a folder that was replaced meanwhile does not matter to one that joins."""
    folder, late = tmp_path / "adapters", f"127.0.0.1:{free_port()}"
    write_adapter(folder / "a", 1, rank=8)
    async with (
        worker_in_process(tiny_model_directory, max_loras=4) as first,
        scheduler(first.address, late, model=str(tiny_model_directory), lora_dir=folder) as one,
        Client(one.target) as client,
    ):
        await until(lambda: one.engine.admits)
        (folder / "a").rename(tmp_path / "gone")
        async with worker_in_process(tiny_model_directory, listen=late, max_loras=4, max_lora_rank=4):
            await until(lambda: any("rank 8" in loop.last_error for loop in one.engine.workers))
        async with worker_in_process(tiny_model_directory, listen=late, max_loras=4) as second:
            await until(lambda: len(one.engine.serving) == 2)
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
    """An adapter that is leaving goes on being wanted by its requests, and is freed behind them."""
    with monkeypatch.context() as before:
        before.setattr(servicer, "load_adapter", load_adapter)
        async with serving(tiny_model_directory, adapters) as (one, worker), Client(one.target) as client:
            slow_down(worker, 0.01)
            expected = await collect(client, "abc", LONG, lora_name="one")
            stream = client.generate("abc", LONG, lora_name="one")
            first = await anext(stream)
            before.undo()
            async with Admin(one.admin_target) as admin:
                await admin.unload_adapter("one")
                load = asyncio.create_task(admin.load_adapter("one"))
                await stuck.wait()
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
                await until(lambda: not one.engine.adapters._loading)
            rest = [token_id async for message in stream for token_id in message.token_ids]
            assert [*first.token_ids, *rest] == expected.outputs[0].token_ids
            await until(lambda: len(worker.worker.adapters.fingerprints) == 2)
            assert [adapter.name for adapter in one.engine.adapters.listed] == ["three", "two"]


async def test_a_connection_that_is_closed_ends_what_is_handed_over(
    tiny_model_directory: Path, adapters: Path, tmp_path: Path, stuck: asyncio.Event
) -> None:
    """It is not taken for a cancelled call of an operator."""
    adapter = read_adapter("one", adapters / "one", tmp_path)
    async with worker_in_process(tiny_model_directory, max_loras=4) as worker:
        client = WorkerClient(worker.address)
        handing = asyncio.create_task(client.load_adapter(adapter.fingerprint, pieces_of(adapter)))
        await stuck.wait()
        await client.reconnect()
        with pytest.raises(UnreachableError):
            await handing
        await client.close()


async def test_a_request_id_in_flight_is_not_gone_on_with_by_another_adapter(
    tiny_model_directory: Path, adapters: Path
) -> None:
    async with serving(tiny_model_directory, adapters) as (one, worker), Client(one.target, retry_for=0) as client:
        slow_down(worker, 0.01)
        stream = client.generate("abc", LONG, lora_name="one", request_id="r")
        first = await anext(stream)
        resumed = pb.GenerateRequest(text="abc", lora_name="two", request_id="r", sampling=LONG)
        resumed.resume.outputs.add(token_ids=first.token_ids)
        resumed.sampling.seed = first.seed
        with pytest.raises(grpc.aio.AioRpcError, match="with another prompt or adapter") as error:
            await client._stub.Generate(resumed).read()
        assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
        await stream.aclose()


def test_adapters_are_counted_by_name_up_to_a_number() -> None:
    counts = AdapterCounts()
    for number in range(MOST_COUNTED + 5):
        counts.add(f"a{number}", FinishedRequest(prompt_tokens=2, output_tokens=3))
    assert len(counts.num_requests) == MOST_COUNTED + 1
    assert counts.num_requests[OTHERS] == 5
    assert (counts.num_prompt_tokens[OTHERS], counts.num_output_tokens[OTHERS]) == (10, 15)
