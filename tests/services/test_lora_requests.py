"""Requests that name low-rank adapters: their tokens are the same whatever is beside them and whatever happens."""

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import pytest
from engines import until
from lora_helpers import ASKED, KINDS, LONG, NAMES, PROMPTS, Asked, Shown, all_together, outputs, refusal, serving
from scheduler_in_process import scheduler
from tiny_adapters import write_adapter, write_three
from worker_in_process import held_until, slow_down, worker_in_process

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.admin_service_pb2 import FinishedRequest
from pagewire_client import Client, SamplingParams
from pagewire_client.llm import collect
from scheduler_service.access.keys import ApiKey, Keyring, digest_of
from scheduler_service.engine.adapters.adapter_counts import MAX_COUNTED, OTHERS, AdapterCounts
from scheduler_service.recording.replayer import Replayer
from worker_service.speculation import drafter


@pytest.fixture(scope="module")
def alone(tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shown]:
    """What each of ASKED says when there is nothing beside it."""

    async def run() -> dict[str, Shown]:
        folder = write_three(tmp_path_factory.mktemp("adapters"))
        async with serving(tiny_model_directory, folder) as (one, _), Client(one.target) as client:
            return {str(asked): await outputs(client, asked[0], asked[1], **asked[2]) for asked in ASKED}

    return asyncio.run(run())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_gpu_blocks_override": 48},
        {"max_loras": 1},
        {"speculative_config": {"method": "ngram"}},
        {"speculative_config": {"method": "draft_model"}},
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
    monkeypatch.setattr(drafter, "numbers_of_drafts", lambda _, mosts, *__, **___: list(mosts))
    if settings.get("speculative_config") == {"method": "draft_model"}:
        settings = {"speculative_config": settings["speculative_config"] | {"model": str(tiny_model_directory)}}
    expected = list(alone.values())
    assert len({str(alone[str((PROMPTS[0], name, KINDS["greedy"]))]) for name in NAMES}) == 4
    recording = tmp_path / "recording"
    async with serving(tiny_model_directory, adapters, recording, **settings) as (one, served):
        here = held_until(served, lambda: len(one.engine.requests.in_flight) == len(ASKED))
        async with Client(one.target) as client, here:
            assert await all_together(client, ASKED) == expected
        await until(lambda: not one.engine.requests.in_flight)
        counts, each = one.engine.adapters.counts, len(ASKED) // len(NAMES)
        assert counts.num_requests == {"one": each, "two": each, "three": each}
        assert counts.num_output_tokens["one"] == len(PROMPTS) * 16 * (4 + 3 + 2)
        (worker,) = one.engine.workers.all
        assert worker.scheduler is not None
        assert sum(worker.scheduler.num_preemptions.values()) > 0 or "num_gpu_blocks_override" not in settings
        assert worker.drafts.verified.num_tokens > 0 or "speculative_config" not in settings
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
        await until(lambda: len(one.engine.workers.serving) == 2)
        (lost,) = [worker for worker in one.engine.workers.all if worker.client.address == first.address]
        async with Client(one.target) as client:
            together = asyncio.create_task(all_together(client, asked))
            await until(lambda: lost.num_steps > 20)
            await first.server.server.stop(None)
            assert await together == expected
        assert lost.num_losses == 1


async def test_a_key_may_name_some_adapters_alone(tiny_model_directory: Path, adapters: Path) -> None:
    """Whether or not others are there."""
    key = ApiKey(id="one", digest=digest_of("secret"), tenant="t", adapters=frozenset({"one", "gone"}))
    async with (
        worker_in_process(tiny_model_directory, max_loras=4) as worker,
        scheduler(worker.address, model=str(tiny_model_directory), lora_dir=adapters, keyring=Keyring([key])) as one,
        Client(one.target, api_key="secret") as client,
    ):
        await until(lambda: one.engine.workers.admits)
        for name in ("", "one"):
            assert (await collect(client, "a", SamplingParams(max_tokens=1), lora_name=name)).outputs
        for name in ("two", "nowhere"):
            assert (await refusal(client, name))[0] is grpc.StatusCode.PERMISSION_DENIED
        assert (await refusal(client, "gone"))[0] is grpc.StatusCode.NOT_FOUND


async def test_many_adapters_share_few_slots(tiny_model_directory: Path, tmp_path: Path) -> None:
    """As many as 200 with arrivals by Zipf's law, of which the worker holds 8: every request ends, and each says what
    it says alone."""
    folder, draw = tmp_path / "adapters", random.Random(1)
    names = [f"a{number}" for number in range(200)]
    for number, name in enumerate(names):
        write_adapter(folder / name, number, rank=1 + number % 4)
    chosen = draw.choices(names, [1 / rank for rank in range(1, 201)], k=200)
    sampling = {"temperature": 0, "max_tokens": 6}
    asked: list[Asked] = [(f"{number} ", name, sampling) for number, name in enumerate(chosen)]
    async with (
        serving(tiny_model_directory, folder, max_cpu_loras=8) as (one, worker),
        Client(one.target) as client,
    ):
        together = await all_together(client, asked)
        for (prompt, name, _), found in list(zip(asked, together, strict=True))[::10]:
            assert await outputs(client, prompt, name, **sampling) == found
        held = worker.worker.adapters
        assert len(held._slots) == 4
        assert len(held.fingerprints) <= 8
        await until(lambda: set(held.fingerprints) == one.engine.workers.all[0].scheduler.adapters.held)
        assert one.engine.workers.all[0].fetch_counts.num_adapters > 30
        assert one.engine.workers.all[0].num_losses == 0


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
    for number in range(MAX_COUNTED + 5):
        counts.add(f"a{number}", FinishedRequest(prompt_tokens=2, output_tokens=3))
    assert len(counts.num_requests) == MAX_COUNTED + 1
    assert counts.num_requests[OTHERS] == 5
    assert (counts.num_prompt_tokens[OTHERS], counts.num_output_tokens[OTHERS]) == (10, 15)
