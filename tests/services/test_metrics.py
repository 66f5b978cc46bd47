"""What a scrape finds: names, meanings, and numbers that add up."""

import asyncio
import contextlib
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest
from engines import until
from fake_worker_service import FakeWorkerService, serving
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from scheduler_in_process import InProcess, scheduler
from test_processes import WORKER_SIZES

from pagewire.v1 import admin_service_pb2 as pb
from pagewire.v1.admin_service_pb2_grpc import AdminServiceStub
from pagewire.v1.scheduler_output_pb2 import LayerGroup
from pagewire_client import Client, SamplingParams
from pagewire_client.llm import collect
from pagewire_client.local import ServiceProcess
from pagewire_common.start_error import StartError
from pagewire_common.telemetry.metrics import MAX_CONNECTIONS, MAX_HEAD_BYTES, serve_metrics
from scheduler_service.core import ModelOutput, PlacementReason
from scheduler_service.engine.workers import proposer_of
from scheduler_service.operations.metrics import SchedulerMetrics
from scheduler_service.statistics.counts import MAX_TENANTS, CountsByTenant, Histogram
from worker_service.serving.servicer import WorkerStatistics
from worker_service.serving.servicer import families as worker_families


async def exchange(address: str, sent: str) -> str:
    """What the server says to this until it closes the connection."""
    reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):  # it may close before it has read all
        writer.write(sent.encode())
        return (await reader.read()).decode()
    return ""


async def get(address: str, path: str = "/metrics") -> str:
    """A plain HTTP request, as a scraper makes it."""
    answer = await exchange(address, f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.0 200"), head
    assert "text/plain" in head
    return body


class Scrape:
    """Samples by name and the labels that are asked for."""

    def __init__(self, text: str) -> None:
        families = list(text_string_to_metric_families(text))
        assert len({family.name for family in families}) == len(families)
        self.types = {family.name: family.type for family in families}
        self.samples = [sample for family in families for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        (value,) = (s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())
        return value

    def by_label(self, name: str, label: str) -> dict[str, float]:
        return {sample.labels[label]: sample.value for sample in self.samples if sample.name == name}


async def scrape(one: InProcess, *, vllm_names: bool = False) -> Scrape:
    metrics = SchedulerMetrics(one.engine.front_ends, lambda: "the-model", vllm_names=vllm_names)
    async with serve_metrics("127.0.0.1:0", metrics.families) as address:
        assert address is not None
        return Scrape(await get(address))


async def nothing() -> list[Metric]:
    return []


async def test_requests_are_counted_from_arrival_to_their_end(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, scheduler(address) as one, Client(one.target) as client:
        assert (await scrape(one))("pagewire_request_success_total", finished_reason="stop") == 0
        await collect(client, [5] * 20, SamplingParams(max_tokens=7, n=2))
        await collect(client, [5] * 20, SamplingParams(max_tokens=9, stop=["gg"]))
        await until(lambda: not one.engine.requests.in_flight and not one.engine.workers.all[0].scheduler.has_work)
        worker.stops_at = worker.num_steps + 5
        stream = client.generate([5] * 20, SamplingParams(max_tokens=100, n=3))
        await anext(stream)
        found = await scrape(one)
        assert found("pagewire_num_requests_running", model_name="the-model") == 1
        assert found("pagewire_kv_cache_usage_perc", worker=address) > 0
        await stream.aclose()
        while one.engine.requests.in_flight:
            await scrape(one)
        found = await scrape(one)
    assert found("pagewire_request_success_total", finished_reason="length") == 2
    assert found("pagewire_request_success_total", finished_reason="stop") == 1
    assert found("pagewire_request_success_total", finished_reason="abort") == 3
    assert found("pagewire_prompt_tokens_total") == found("pagewire_prefix_cache_queries_total") == 60
    assert found("pagewire_prefix_cache_hits_total") == 32
    generated = found("pagewire_generation_tokens_total")
    assert generated >= 2 * 7 + 2 + 1
    assert found("pagewire_time_to_first_token_seconds_count") == 3
    assert found("pagewire_request_queue_time_seconds_count") == 3
    assert found("pagewire_e2e_request_latency_seconds_count") == 2  # of those that were not aborted
    assert found("pagewire_request_prompt_tokens_bucket", le="20.0") == 2
    assert found("pagewire_request_prompt_tokens_sum") == 40
    assert found("pagewire_request_generation_tokens_bucket", le="10.0") == 3
    assert found("pagewire_request_generation_tokens_sum") == 2 * 7 + 2
    assert found("pagewire_tenant_requests_total", tenant="") == 3
    assert found("pagewire_tenant_prompt_tokens_total", tenant="") == 60
    num_outputs = 2 + 1 + 3
    most_unseen = 9 - 2  # what the second request's output may gain before the engine knows of the stop string
    assert generated - num_outputs - most_unseen <= found("pagewire_inter_token_latency_seconds_count") < generated
    assert 0 < found("pagewire_request_queue_time_seconds_sum") <= found("pagewire_time_to_first_token_seconds_sum")
    assert found("pagewire_steps_total", worker=address) >= 7
    assert found("pagewire_step_phase_seconds_total", worker=address, phase="schedule") > 0
    assert found("pagewire_placements_total", reason="alone") == 3
    assert found("process_resident_memory_bytes") > 0


async def test_blocks_are_counted_by_group_of_layers(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.info.layer_groups.extend([LayerGroup(block_size=8), LayerGroup(block_size=4, window=6), LayerGroup()])
    async with serving(worker) as address, scheduler(address) as one, Client(one.target) as client:
        stream = client.generate([5] * 20, SamplingParams(max_tokens=50))
        await anext(stream)
        worker.runs.clear()
        found = await scrape(one)
        worker.runs.set()
        async for _ in stream:
            pass
        after = await scrape(one)
    assert found.by_label("pagewire_layer_group_blocks_held", "kind").keys() == {"full", "window 6", "states"}
    for number, kind in enumerate(["full", "window 6", "states"]):
        labels = {"worker": address, "group": str(number), "kind": kind}
        assert found("pagewire_layer_group_blocks_held", **labels) > 0
        assert after("pagewire_layer_group_blocks_held", **labels) == 0
        assert after("pagewire_layer_group_blocks_cached", **labels) > 0


async def test_every_placement_choice_is_in_the_metrics_and_in_the_state() -> None:
    """All numbers differ, so that a mix-up shows."""
    placed, left = ({reason: base + number for number, reason in enumerate(PlacementReason)} for base in (10, 20))
    async with scheduler("127.0.0.1:1") as one, grpc.aio.insecure_channel(one.admin_target) as channel:
        balancer = one.engine.requests.waiting.balancer
        balancer.num_placed, balancer.num_left = placed, left
        balancer.num_overtakes, balancer.num_moved = 30, 31
        found = await scrape(one)
        state = (await AdminServiceStub(channel).GetClusterState(pb.GetClusterStateRequest())).state
    assert found.by_label("pagewire_placements_total", "reason") == by_name(placed) == dict(state.placement.placed)
    assert found.by_label("pagewire_placements_left_total", "reason") == by_name(left) == dict(state.placement.left)
    assert found("pagewire_placement_overtakes_total") == 30 == state.placement.num_overtakes
    assert found("pagewire_placement_moves_total") == 31 == state.placement.num_moved


async def test_guesses_are_counted_by_their_position() -> None:
    async with scheduler("127.0.0.1:1") as one, grpc.aio.insecure_channel(one.admin_target) as channel:
        guesses = one.engine.workers.all[0].drafts
        guesses.verified.count([4, 4, 2])
        guesses.right.count([3, 0, 1])
        guesses.proposer = "ngram"
        found = await scrape(one)
        (worker,) = (await AdminServiceStub(channel).GetClusterState(pb.GetClusterStateRequest())).state.workers
    assert list(worker.num_guessed_by_position) == [3, 3, 2, 2]
    assert list(worker.num_accepted_by_position) == [2, 1, 1]
    assert found("pagewire_spec_decode_num_drafts_total") == 3
    assert found("pagewire_spec_decode_num_draft_tokens_total") == 10 == worker.num_guessed_tokens
    assert found("pagewire_spec_decode_num_accepted_tokens_total") == 4 == worker.num_accepted_tokens
    by_position = found.by_label("pagewire_spec_decode_num_accepted_tokens_per_pos_total", "position")
    assert by_position == {"0": 2, "1": 1, "2": 1}
    assert found.by_label("pagewire_spec_decode_info", "proposer") == {"ngram": 1}
    assert worker.proposer == "ngram"


async def test_a_sequence_that_is_late_takes_nothing_from_the_guesses_that_were_right() -> None:
    async with scheduler("127.0.0.1:1") as one, grpc.aio.insecure_channel(one.admin_target) as channel:
        one.engine.workers.all[0].drafts.take(ModelOutput(1, [5], [0, 0, 1], num_draft_tokens=[0, 2, 1]))
        found = await scrape(one)
        (worker,) = (await AdminServiceStub(channel).GetClusterState(pb.GetClusterStateRequest())).state.workers
    assert (worker.num_guessed_tokens, worker.num_accepted_tokens) == (3, 0)
    assert found("pagewire_spec_decode_num_accepted_tokens_total") == 0


@pytest.mark.parametrize(
    ("features", "proposer"),
    [
        (["swap", "speculate:eagle"], "eagle"),
        (["swap"], ""),
        (["speculate:"], ""),
        (['speculate:x"} 1\n'], ""),
        (["speculate:" + "x" * 999], "x" * 16),
    ],
)
def test_what_a_worker_says_that_it_guesses_with_is_a_short_label(features: list[str], proposer: str) -> None:
    assert proposer_of(features) == proposer


def by_name(counts: Mapping[PlacementReason, int]) -> dict[str, int]:
    return {reason.name.lower(): count for reason, count in counts.items()}


async def test_queued_requests_per_worker_is_there_to_scale_on(byte_tokenizer_directory: Path) -> None:
    workers = [FakeWorkerService(byte_tokenizer_directory) for _ in range(2)]
    for worker in workers:
        worker.runs.clear()
    async with (
        serving(workers[0]) as first,
        serving(workers[1]) as second,
        scheduler(first, second, max_num_seqs=1) as one,
        Client(one.target) as client,
    ):
        await one.engine.model()
        reading = [asyncio.create_task(collect(client, [5], SamplingParams(max_tokens=400))) for _ in range(10)]
        await until(lambda: len(one.engine.requests.in_flight) == 10)
        while (found := await scrape(one))("pagewire_num_requests_running") < 2:
            pass
        waiting = found("pagewire_num_requests_waiting")
        assert waiting == 8
        assert found("pagewire_queued_requests_per_worker") == waiting / 2
        assert found("pagewire_workers", status="serving") == 2
        one.engine.fleet.drain(one.engine.workers.find(first))
        found = await scrape(one)
        assert found("pagewire_queued_requests_per_worker") == found("pagewire_num_requests_waiting")
        assert found("pagewire_workers", status="draining") == 1
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def test_what_vllm_has_too_can_be_had_under_its_names(byte_tokenizer_directory: Path) -> None:
    async with (
        serving(FakeWorkerService(byte_tokenizer_directory)) as address,
        scheduler(address) as one,
        Client(one.target) as client,
    ):
        await collect(client, [5], SamplingParams(max_tokens=7))
        assert not [sample for sample in (await scrape(one)).samples if sample.name.startswith("vllm:")]
        found = await scrape(one, vllm_names=True)
    types = {name.removeprefix("vllm:"): kind for name, kind in found.types.items() if name.startswith("vllm:")}
    assert types == {
        "num_requests_running": "gauge",
        "num_requests_waiting": "gauge",
        "num_requests_swapped": "gauge",
        "kv_cache_usage_perc": "gauge",
        "num_preemptions": "counter",
        "prefix_cache_queries": "counter",
        "prefix_cache_hits": "counter",
        "prompt_tokens": "counter",
        "generation_tokens": "counter",
        "spec_decode_num_draft_tokens": "counter",
        "spec_decode_num_accepted_tokens": "counter",
        "mm_cache_queries": "counter",
        "mm_cache_hits": "counter",
        "spec_decode_num_drafts": "counter",
        "spec_decode_num_accepted_tokens_per_pos": "counter",
        "request_success": "counter",
        "time_to_first_token_seconds": "histogram",
        "inter_token_latency_seconds": "histogram",
        "e2e_request_latency_seconds": "histogram",
        "request_queue_time_seconds": "histogram",
        "request_prompt_tokens": "histogram",
        "request_generation_tokens": "histogram",
        "request_prefill_time_seconds": "histogram",
        "request_decode_time_seconds": "histogram",
        "request_inference_time_seconds": "histogram",
        "request_time_per_output_token_seconds": "histogram",
        "request_params_n": "histogram",
        "request_params_max_tokens": "histogram",
        "iteration_tokens_total": "histogram",
        "cache_config_info": "gauge",
    }
    assert found("vllm:generation_tokens_total", model_name="the-model", engine="0") == 7
    assert found("vllm:kv_cache_usage_perc", engine=address) == 0
    for name, kind in types.items():
        ours = name.removesuffix("_total") if kind == "histogram" else name
        assert found.types[f"pagewire_{ours}"] == kind


UNITS = re.compile(
    r"_(s|ms|us|ns|sec|b|kb|mb|gb|tb|pb|m|h|d|(milli|micro|nano)seconds|minutes|hours|days|(kilo|mega)bytes)(_|$)"
)


def promtools_complaints(family: Metric) -> list[str]:
    """Of a family's name and help: the rules of `promtool check metrics` that it breaks."""
    rules = {
        "no help": not family.documentation,
        "characters": not re.fullmatch("[a-z_][a-z0-9_]*", family.name),
        "a unit that is no base unit, or short": UNITS.search(family.name),
        "its type in its name": re.search("_(gauge|counter|histogram|summary)(_|$)", family.name),
        "an end that says counter": family.type != "counter" and family.name.endswith("_total"),
        "an end of a histogram's series": family.name.endswith(("_bucket", "_count", "_sum")),
        "a counter without _total": family.type == "counter"
        and not all(sample.name.endswith("_total") for sample in family.samples),
    }
    return [f"{family.name}: {rule}" for rule, is_broken in rules.items() if is_broken]


async def test_names_are_as_promtool_wants_them(byte_tokenizer_directory: Path) -> None:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, scheduler(address) as one:
        await one.engine.model()
        ours = await SchedulerMetrics(one.engine.front_ends, lambda: "the-model", vllm_names=False).families()
    sizes = {"num_sequences": 0, "num_device_blocks": 1, "num_host_blocks": 1, "draining": False}
    found = [*ours, *worker_families(WorkerStatistics(), **sizes)]
    assert len(found) > 50
    assert [complaint for family in found for complaint in promtools_complaints(family)] == []


def test_tenants_are_told_apart_as_long_as_they_are_few() -> None:
    counts = CountsByTenant()
    for number in range(200):
        counts.of(f"tenant {number % 100}").finished(3, 2)
    assert len(counts.tenants) == MAX_TENANTS + 1
    few = counts.tenants["tenant 5"]
    assert (few.num_requests, few.num_prompt_tokens, few.num_output_tokens) == (2, 6, 4)
    assert counts.tenants["(others)"].num_requests == 2 * (100 - MAX_TENANTS)
    assert counts.total.num_requests == 200


def test_tenants_that_are_told_apart_stay_so_in_whatever_order_front_ends_are_summed() -> None:
    parts = [CountsByTenant(), CountsByTenant()]
    for part, start in zip(parts, (0, 20), strict=True):
        for number in range(start, start + MAX_TENANTS):
            part.of(f"tenant {number}").finished(1, 1)
    names: set[str] = set()
    sums = []
    for order in (parts, parts[::-1]):
        total = CountsByTenant(names)
        for part in order:
            total.add(CountsByTenant.decode(part.encode()))
        sums.append({tenant: counts.num_requests for tenant, counts in total.tenants.items()})
    assert sums[0] == sums[1]
    assert sum(sums[0].values()) == 2 * MAX_TENANTS
    assert len(sums[0]) == MAX_TENANTS + 1


def test_a_histogram_counts_every_value_once() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 7.5


async def test_without_an_address_nothing_is_served_and_one_in_use_is_an_error() -> None:
    async with serve_metrics(None, nothing) as address:
        assert address is None
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StartError, match=r"--metrics-listen: cannot listen on 127\.0\.0\.1:.* in use"):
            async with serve_metrics(f"127.0.0.1:{taken.getsockname()[1]}", nothing):
                pass


async def test_an_event_loop_in_use_is_not_touched_by_a_connection_that_says_nothing() -> None:
    async with serve_metrics("127.0.0.1:0", nothing) as address:
        assert address is not None
        _, writer = await asyncio.open_connection(*address.rsplit(":", 1))
        assert "process_cpu_seconds_total" in await get(address)
        writer.close()


async def test_both_services_serve_metrics_where_they_are_told_to_and_stop_all_the_same(
    tiny_model_directory: Path,
) -> None:
    """The worker's sums of tokens are those of the scheduler's requests."""
    processes: list[ServiceProcess] = []

    def start(module: str, *arguments: str) -> tuple[str, str]:
        common = ["--model", str(tiny_model_directory), "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
        processes.append(ServiceProcess(module, [*common, *arguments]))
        return str(processes[-1].wait_for("metrics", 60)["address"]), str(
            processes[-1].wait_for("listening", 60)["address"]
        )

    try:
        worker_metrics, worker = await asyncio.to_thread(start, "worker_service", *WORKER_SIZES)
        scheduler_metrics, target = await asyncio.to_thread(start, "scheduler_service", "--workers", worker)
        async with Client(target) as client:
            await client.wait_until_serving(60)
            await collect(client, "hello", SamplingParams(max_tokens=7, n=2, ignore_eos=True))
        computed, counted = Scrape(await get(worker_metrics)), Scrape(await get(scheduler_metrics))
        while computed("pagewire_worker_sequences"):  # the worker hears of their end after the client does
            computed = Scrape(await get(worker_metrics))
    finally:
        statuses = [process.stop() for process in reversed(processes)]
    assert statuses == [0, 0]
    assert counted("pagewire_generation_tokens_total", model_name="tiny-llama") == 14
    assert computed("pagewire_worker_sampled_tokens_total") == 14
    assert computed("pagewire_worker_tokens_total") == 5 + 2 * 6 + 1  # the prompt's last token once more for the fork
    assert computed("pagewire_worker_steps_total") >= 7
    assert counted("pagewire_steps_total", worker=worker) >= 7
    assert computed("pagewire_worker_device_blocks") == 64
    assert computed("pagewire_worker_sequences") == 0
    assert computed("pagewire_worker_failures_total") == 0
    assert computed("pagewire_worker_step_phase_seconds_total", phase="forward") > 0


async def test_a_head_has_a_length_and_connections_a_number() -> None:
    async with serve_metrics("127.0.0.1:0", nothing) as address:
        assert address is not None
        assert "200 OK" in await exchange(address, f"GET /metrics HTTP/1.0\r\nX: {'x' * 1000}\r\n\r\n")
        assert not await exchange(address, f"GET /metrics HTTP/1.0\r\nX: {'x' * MAX_HEAD_BYTES}\r\n\r\n")
        silent = [await asyncio.open_connection(*address.rsplit(":", 1)) for _ in range(MAX_CONNECTIONS)]
        assert not await exchange(address, "GET /metrics HTTP/1.0\r\n\r\n")
        for _, writer in silent:
            writer.close()
        while not (found := await exchange(address, "GET /metrics HTTP/1.0\r\n\r\n")):
            pass  # the server has yet to see that they are closed
        assert "200 OK" in found
