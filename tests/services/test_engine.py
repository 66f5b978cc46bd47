"""The engine in this process, against workers over real gRPC that can be told to fail."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from engines import running, submit, text_of, until
from fake_worker_service import FakeWorkerService, serving
from structlog.testing import capture_logs

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.scheduler_output_pb2 import LayerGroup
from pagewire_common.calls.errors import RequestError
from scheduler_service.core import SamplingParams
from scheduler_service.engine.calls import requests as requests_module
from scheduler_service.engine.engine import Engine
from scheduler_service.engine.sessions.worker_loop import WorkerLoop
from scheduler_service.engine.worker_link.errors import WorkerError
from scheduler_service.frontend.link.engine_call import EngineCall
from scheduler_service.frontend.output.request import GenerationRequest
from scheduler_service.frontend.servicer import InferenceServicer
from scheduler_service.settings import SchedulerSettings
from scheduler_service.wire.codec import decode_worker_info


@pytest.mark.usefixtures("impatient")
async def test_a_poison_request_ends_with_an_error_and_its_neighbours_finish(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory, poison=99)
    async with serving(worker) as address, running(address) as engine:
        poison = asyncio.create_task(text_of(engine, await submit(engine, "poison", [5, 99])))
        neighbours = [
            asyncio.create_task(text_of(engine, await submit(engine, str(number), [5, 6], n=2))) for number in range(3)
        ]
        with pytest.raises(RequestError, match="workers failed in a row") as error:
            await poison
        assert error.value.code is grpc.StatusCode.INTERNAL
        assert [await neighbour for neighbour in neighbours] == ["g" * 10] * 3
        assert not engine.requests.in_flight
        (loop,) = engine.workers.all
        await until(lambda: loop.admits)
        assert worker.num_sessions >= 5  # four losses at least: see suspects/rule.py
        assert loop.scheduler is not None
        assert loop.scheduler.blocks.device.num_free == 64


async def test_a_step_smaller_than_the_workers_blocks_is_refused_with_both_sizes(
    byte_tokenizer_directory: Path,
) -> None:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address:
        engine = Engine(SchedulerSettings(workers=[address], model="fake", max_num_batched_tokens=4))
        reason = "it cannot be scheduled: --max-num-batched-tokens of this scheduler is 4; it must be at least 8, "
        with pytest.raises(WorkerError, match=reason):
            await WorkerLoop(engine.fleet, engine.workers.all[0])._serve()
        await engine.workers.all[0].client.close()


WINDOWS = [LayerGroup(block_size=8), LayerGroup(block_size=4, window=16)]
STATES = [LayerGroup(block_size=8), *[LayerGroup()] * 2]


@pytest.mark.parametrize(
    ("first", "later", "block_size", "reason"),
    [
        (
            [],
            WINDOWS,
            8,
            "the worker's groups of layers are: full (8 tokens a block), window 16 (4 tokens a block); earlier workers "
            "have: one for all (8 tokens a block); start the workers that have several groups with "
            "--disable-hybrid-kv-cache-manager",
        ),
        (WINDOWS, [], 16, "one for all (16 tokens a block); earlier workers have: full (8 tokens a block), "),
        (WINDOWS, STATES, 8, "the worker's groups of layers are: full (8 tokens a block), 2 x states; earlier "),
        (STATES, STATES[:2], 8, "2 x states; it needs the same --block-size, --max-model-len, "),
        ([], [], 16, "the worker's block size is 16; that of earlier workers is 8; start it with --block-size 8"),
    ],
)
async def test_a_worker_with_other_groups_of_layers_is_refused_with_both(
    first: list[LayerGroup],
    later: list[LayerGroup],
    block_size: int,
    reason: str,
    byte_tokenizer_directory: Path,
) -> None:
    """As in a fleet of CPUs and GPUs: a GPU has several groups only if the model needs them."""
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.info.layer_groups.extend(first)
    async with serving(worker) as address, running(address) as engine:
        await engine.model()
        client = engine.workers.all[0].client
        await engine.fleet.agreement.accept(client, decode_worker_info(worker.info))
        del worker.info.layer_groups[:]
        worker.info.layer_groups.extend(later)
        worker.info.block_size = block_size
        with pytest.raises(WorkerError, match=re.escape(reason)):
            await engine.fleet.agreement.accept(client, decode_worker_info(worker.info))


async def test_a_step_smaller_than_a_block_with_states_is_refused_with_the_flag_and_both_sizes(
    byte_tokenizer_directory: Path,
) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.info.block_size, worker.info.max_num_batched_tokens = 1168, 2048
    worker.info.layer_groups.extend([LayerGroup(block_size=1168), LayerGroup()])
    async with serving(worker) as address, running(address, max_num_batched_tokens=512) as engine:
        (loop,) = engine.workers.all
        await until(lambda: "scheduled" in loop.last_error)
    assert loop.last_error == (
        "it cannot be scheduled: --max-num-batched-tokens of this scheduler is 512; it must be at least 1168, the "
        "tokens of the worker's blocks, which follow from its --block-size and the model's groups of layers"
    )


async def test_a_worker_with_less_room_than_was_promised_is_refused(byte_tokenizer_directory: Path) -> None:
    large = FakeWorkerService(byte_tokenizer_directory, num_device_blocks=64)
    small = FakeWorkerService(byte_tokenizer_directory, num_device_blocks=63)
    large.info.encoder_cache_size = small.info.encoder_cache_size = 50
    async with serving(large) as address, running(address) as engine:
        await engine.model()
        client = engine.workers.all[0].client
        await engine.fleet.agreement.accept(client, decode_worker_info(large.info))
        with pytest.raises(WorkerError, match="longest sequence is 504; requests were promised 512"):
            await engine.fleet.agreement.accept(client, decode_worker_info(small.info))
        large.info.encoder_cache_size = 49
        with pytest.raises(WorkerError, match="encoder cache has 49 tokens; requests were promised 50"):
            await engine.fleet.agreement.accept(client, decode_worker_info(large.info))


async def test_a_worker_with_a_somewhat_smaller_cache_than_the_first_ones_is_welcome(
    byte_tokenizer_directory: Path,
) -> None:
    """A worker that starts later on the same machine finds less free memory."""
    first = FakeWorkerService(byte_tokenizer_directory, num_device_blocks=200)
    async with serving(first) as address, running(address) as engine:
        await engine.model()
        client = engine.workers.all[0].client
        first.info.num_device_blocks = 100
        await engine.fleet.agreement.accept(client, decode_worker_info(first.info))
        first.info.num_device_blocks = 99
        with pytest.raises(WorkerError, match="pool is 792; requests were promised 800"):
            await engine.fleet.agreement.accept(client, decode_worker_info(first.info))


async def test_the_page_of_pagewire_serve_may_give_the_worker_a_small_pool(byte_tokenizer_directory: Path) -> None:
    first = FakeWorkerService(byte_tokenizer_directory, num_device_blocks=200)
    async with serving(first) as address, running(address, learn_pipe=9) as engine:
        await engine.model()
        first.info.num_device_blocks = 10
        await engine.fleet.agreement.accept(engine.workers.all[0].client, decode_worker_info(first.info))


async def test_two_workers_share_one_queue_and_a_request_does_not_care_which(byte_tokenizer_directory: Path) -> None:
    workers = [FakeWorkerService(byte_tokenizer_directory) for _ in range(2)]
    async with serving(workers[0]) as first, serving(workers[1]) as second, running(first, second) as engine:
        states = [await submit(engine, str(number), [5] * 100, max_tokens=50) for number in range(40)]
        assert await asyncio.gather(*(text_of(engine, state) for state in states)) == ["g" * 50] * 40
        while not all(loop.num_steps for loop in engine.workers.all):
            await asyncio.gather(text_of(engine, await submit(engine, "one", [5])))


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
async def test_every_policy_serves_every_request(byte_tokenizer_directory: Path, policy: str) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory, num_device_blocks=16)
    async with (
        serving(worker) as address,
        running(address, scheduling_policy=policy, tenant_weights={"0": 2.0}) as engine,
    ):
        states = []
        for number in range(30):
            request = GenerationRequest(
                request_id=str(number),
                prompt_token_ids=[5] * 20,
                sampling=SamplingParams(max_tokens=20),
                priority=number % 3,
                tenant=str(number % 2),
            )
            states.append(await engine.submit(request))
        assert await asyncio.gather(*(text_of(engine, state) for state in states)) == ["g" * 20] * 30


async def test_a_full_server_refuses_before_it_tokenizes(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address, max_num_requests=1) as engine:
        with EngineCall(engine.link) as first, EngineCall(engine.link) as second:
            await first.admit("first", 0)
            with pytest.raises(RequestError) as error:
                await second.admit("second", 0)
        assert error.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        with EngineCall(engine.link) as second:  # the first has gone
            await second.admit("second", 0)


@pytest.mark.parametrize("method", ["gain_token", "gain"])
async def test_one_requests_broken_text_does_not_cost_the_others_their_tokens(
    method: str, byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address) as engine:
        await until(lambda: engine.workers.admits)
        worker.runs.clear()
        broken = await submit(engine, "broken", [5])
        monkeypatch.setattr(broken, method, lambda *_: 1 / 0)
        well = await submit(engine, "well", [5])
        worker.runs.set()
        with pytest.raises(RequestError) as error:
            await text_of(engine, broken)
        assert error.value.code is grpc.StatusCode.INTERNAL
        assert await text_of(engine, well) == "ggggg"
        assert engine.workers.all[0].num_preemptions == 0


async def test_a_request_that_cannot_be_queued_costs_no_other_its_stream(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address) as engine:
        worker.runs.clear()
        well = await submit(engine, "well", [5])
        with monkeypatch.context() as patch:
            patch.setattr(requests_module, "decode_group", lambda *_: 1 / 0)
            with pytest.raises(RequestError, match="internal error") as error:
                await submit(engine, "broken", [5])
        assert error.value.code is grpc.StatusCode.INTERNAL
        worker.runs.set()
        assert await text_of(engine, well) == "ggggg"
        await until(lambda: not engine.requests.in_flight and not engine.requests.admission.being_checked)
        assert engine.requests.admission.num_bytes == 0


async def test_a_worker_with_more_blocks_than_a_scheduler_can_manage_is_refused(
    byte_tokenizer_directory: Path,
) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address) as engine:
        await engine.model()
        worker.info.num_host_blocks = 2**31 - 1
        with pytest.raises(WorkerError, match=r"has 2147483711 blocks; this scheduler manages at most"):
            await engine.fleet.agreement.accept(engine.workers.all[0].client, decode_worker_info(worker.info))


@pytest.mark.parametrize(("setting", "chunk"), [(None, 5), (7, 7), (0, 0)])
async def test_a_prompt_takes_a_quarter_of_a_step_unless_told_otherwise_while_others_want_the_rest(
    byte_tokenizer_directory: Path, setting: int | None, chunk: int
) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with (
        serving(worker) as address,
        running(address, max_num_batched_tokens=18, long_prefill_token_threshold=setting) as engine,
    ):
        await engine.model()
        await until(lambda: engine.workers.serving)
        ((scheduler, _),) = engine.workers.serving.items()
        assert scheduler.config.max_prefill_chunk == chunk


async def test_the_most_sequences_are_promised_as_a_step_has_tokens_for_them(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.info.max_num_batched_tokens = 10
    async with serving(worker) as address, running(address, max_num_batched_tokens=12) as engine:
        assert (await engine.model()).max_num_seqs == 10
        await until(lambda: engine.workers.admits)
        scheduler = engine.workers.all[0].scheduler
        assert scheduler is not None
        assert scheduler.config.max_num_seqs == 10
        worker.info.max_num_batched_tokens = 9
        with pytest.raises(WorkerError, match="largest step is 9; requests were promised 10"):
            await engine.fleet.agreement.accept(engine.workers.all[0].client, decode_worker_info(worker.info))


async def test_the_first_worker_decides_what_is_served_unless_a_model_is_named(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address, model=None) as engine:
        assert engine.fleet.agreement.model_name == ""
        assert (await engine.model()).name == "fake"
        assert engine.fleet.agreement.model_name == "fake"
        worker.info.model_id = "other"
        with pytest.raises(WorkerError, match="serves the model 'other', this scheduler 'fake'"):
            await engine.fleet.agreement.accept(engine.workers.all[0].client, decode_worker_info(worker.info))


async def test_limits_of_a_worker_are_lowered_and_not_raised(
    byte_tokenizer_directory: Path,
) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)  # 128 tokens of 16 sequences
    for settings, found in (
        ({}, (128, 16)),
        ({"max_num_batched_tokens": 100, "max_num_seqs": 9}, (100, 9)),
        ({"max_num_batched_tokens": 200, "max_num_seqs": 17}, (128, 16)),
    ):
        with capture_logs() as logs:
            async with serving(worker) as address, running(address, **settings) as engine:
                await until(lambda engine=engine: engine.workers.serving)
                (scheduler,) = engine.workers.serving
                assert (scheduler.config.max_num_batched_tokens, scheduler.config.max_num_seqs) == found
        said = {(line["flag"], line["value"], line["limit"]) for line in logs if "above the worker's" in line["event"]}
        above = {("--max-num-batched-tokens", 200, 128), ("--max-num-seqs", 17, 16)}
        assert said == (above if settings.get("max_num_seqs") == 17 else set())


async def test_steps_of_later_workers_are_no_larger_than_the_first_ones(byte_tokenizer_directory: Path) -> None:
    """Sizes of requests are checked against the first worker's."""
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address) as engine:
        await engine.model()
        worker.info.max_num_seqs, worker.info.max_num_batched_tokens = 99, 999
        config = await engine.fleet.agreement.accept(engine.workers.all[0].client, decode_worker_info(worker.info))
        assert (config.max_num_batched_tokens, config.max_num_seqs) == (128, 16)


async def test_a_later_worker_needs_room_for_the_largest_request_and_not_for_the_first_ones_step(
    byte_tokenizer_directory: Path,
) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.info.max_num_seqs = worker.info.max_num_batched_tokens = 512
    async with serving(worker) as address, running(address) as engine:
        await engine.model()
        worker.info.max_num_seqs = 128
        assert (
            await engine.fleet.agreement.accept(engine.workers.all[0].client, decode_worker_info(worker.info))
        ).max_num_seqs == 128
        worker.info.max_num_seqs = 127
        with pytest.raises(WorkerError, match="largest step is 127; requests were promised 128"):
            await engine.fleet.agreement.accept(engine.workers.all[0].client, decode_worker_info(worker.info))


async def test_a_request_has_one_timer_while_there_is_no_worker_and_none_after_it_is_closed(
    byte_tokenizer_directory: Path,
) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address, no_worker_timeout=1000) as engine:
        (loop,) = engine.workers.all
        await until(lambda: loop.admits)
        worker.runs.clear()
        state = await submit(engine, "a", [5])
        call = engine.requests.in_flight["a"]
        assert call.expiry is None
        for _ in range(3):
            engine.fleet.drain(loop)
            first = call.expiry
            assert first is not None
            engine.fleet.note_change()
            assert call.expiry is first
            engine.fleet.undrain(loop)
            assert call.expiry is None
            assert first.cancelled()
        engine.fleet.drain(loop)
        await engine.close(state)
        assert call.expiry is not None
        assert call.expiry.cancelled()


async def test_no_scheduler_is_asked_for_a_request_that_ended_by_itself(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, running(address) as engine:
        state = await submit(engine, "a", [5])
        assert "".join([delta.text async for delta in state.stream]) == "ggggg"
        call = engine.requests.in_flight["a"]
        with monkeypatch.context() as patch:
            patch.setattr(engine.workers, "finish", lambda *_: 1 / 0)
            engine.engine.close(call)
        await engine.close(state)
        assert not engine.requests.in_flight


async def test_calls_that_wait_for_the_first_worker_count_as_requests() -> None:
    async with running("127.0.0.1:1", max_num_requests=1, no_worker_timeout=5) as engine:
        servicer = InferenceServicer(engine.link)
        context: Any = SimpleNamespace(invocation_metadata=tuple)
        first = asyncio.create_task(servicer.Generate(pb.GenerateRequest(), context))
        await until(lambda: engine.requests.admission.being_checked)
        with pytest.raises(RequestError) as error:
            await servicer.Generate(pb.GenerateRequest(), context)
        assert error.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        with EngineCall(engine.link) as call:
            await call.admit("its place is free again", 0)
