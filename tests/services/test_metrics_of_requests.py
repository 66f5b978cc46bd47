"""What a scrape tells of requests by their phases and parameters, and what gateways choose a scheduler by."""

import asyncio
import time
from pathlib import Path

import pytest
from engines import until
from fake_worker_service import FakeWorkerService, serving
from lora_helpers import NAMES
from lora_helpers import serving as serving_adapters
from scheduler_in_process import scheduler
from test_metrics import scrape

from pagewire_client import Client, SamplingParams
from pagewire_client.llm import collect
from scheduler_service.operations import metrics

LONG = SamplingParams(max_tokens=60, ignore_eos=True)


async def test_a_requests_phases_add_up_and_its_parameters_are_counted(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, scheduler(address) as one, Client(one.target) as client:
        await collect(client, [5] * 20, SamplingParams(max_tokens=7, n=2, ignore_eos=True))
        await collect(client, [5] * 20, SamplingParams(max_tokens=1, ignore_eos=True))
        found = await scrape(one, vllm_names=True)
    for prefix in ("pagewire_", "vllm:"):
        sums = {
            phase: found(f"{prefix}request_{phase}_time_seconds_sum") for phase in ("prefill", "decode", "inference")
        }
        assert 0 < sums["prefill"] < sums["inference"] == pytest.approx(sums["prefill"] + sums["decode"])
        for phase in sums:
            assert found(f"{prefix}request_{phase}_time_seconds_count") == 2
        assert found(f"{prefix}request_time_per_output_token_seconds_count") == 1
        assert found(f"{prefix}request_params_n_sum") == 3
        assert found(f"{prefix}request_params_max_tokens_sum") == 8
        assert found(f"{prefix}request_params_max_tokens_bucket", le="5.0") == 1


async def test_the_tokens_of_every_step_are_counted_and_the_cache_is_described(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, scheduler(address) as one, Client(one.target) as client:
        await collect(client, [5] * 20, SamplingParams(max_tokens=7, ignore_eos=True))
        await until(lambda: not one.engine.workers.all[0].scheduler.has_work)
        found = await scrape(one, vllm_names=True)
        blocks = one.engine.workers.all[0].scheduler.blocks
        sizes = {"block_size": str(blocks.block_size), "num_gpu_blocks": str(blocks.device.num_blocks)}
    for prefix, label, total in (("pagewire_", "worker", ""), ("vllm:", "engine", "_total")):
        assert found(f"{prefix}iteration_tokens{total}_sum", **{label: address}) == 20 + 6
        assert found(f"{prefix}iteration_tokens{total}_bucket", le="1.0") == 6
        assert found(f"{prefix}cache_config_info", **{label: address}, **sizes) == 1


async def test_gateways_see_which_adapters_run_and_wait_and_how_many_can(
    tiny_model_directory: Path, adapters: Path
) -> None:
    """As the model-server protocol of Kubernetes' inference gateway has it."""
    _, first, second, *_ = NAMES
    async with serving_adapters(tiny_model_directory, adapters, max_loras=1) as (one, _), Client(one.target) as client:
        idle = await scrape(one, vllm_names=True)
        calls = [asyncio.ensure_future(collect(client, "a", LONG, lora_name=name)) for name in (first, second)]
        await until(lambda: len(one.engine.requests.in_flight) == 2 and len(one.engine.requests.waiting) == 1)
        busy = await scrape(one, vllm_names=True)
        await asyncio.gather(*calls)
    for found, running_and_waiting in ((idle, ["", ""]), (busy, sorted([first, second]))):  # either may have come first
        (sample,) = (sample for sample in found.samples if sample.name == "vllm:lora_requests_info")
        assert sample.labels["max_lora"] == "1"
        labels = [sample.labels[f"{state}_lora_adapters"] for state in ("running", "waiting")]
        assert sorted(labels) == running_and_waiting
        assert time.time() - 60 < sample.value <= time.time()


def test_a_label_names_no_more_adapters_than_are_told_apart() -> None:
    used = metrics.Counter({f"adapter-{number}": number for number in range(1, 501)})
    names = metrics._most_used(used).split(",")
    assert len(names) == metrics.MAX_COUNTED
    assert "adapter-500" in names
    assert "adapter-1" not in names


async def test_without_adapters_nothing_is_said_of_them(byte_tokenizer_directory: Path) -> None:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, scheduler(address) as one:
        await one.engine.model()
        found = await scrape(one, vllm_names=True)
    assert not [sample for sample in found.samples if "lora" in sample.name]
