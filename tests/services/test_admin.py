"""AdminService: the state of the cluster, and workers that are taken out of it and put back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from fake_worker_service import FakeWorkerService, serving
from scheduler_in_process import InProcess, scheduler

from pagewire.v1 import admin_service_pb2 as pb
from pagewire.v1.admin_service_pb2_grpc import AdminServiceStub
from pagewire.v1.scheduler_output_pb2 import LayerGroup
from pagewire_client import Client, SamplingParams
from pagewire_client.admin import Admin
from pagewire_client.llm import collect

Watch = AsyncIterator[pb.WatchClusterStateResponse]


@pytest.fixture
async def one(byte_tokenizer_directory: Path) -> AsyncIterator[InProcess]:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, scheduler(address) as one:
        await one.engine.model()
        yield one


@pytest.fixture
async def stub(one: InProcess) -> AsyncIterator[AdminServiceStub]:
    async with grpc.aio.insecure_channel(one.admin_target) as channel:
        yield AdminServiceStub(channel)


async def until(stub: AdminServiceStub, status: "pb.WorkerStatus") -> pb.ClusterState:
    """The first state in which the only worker has this status."""
    async for response in (watch := stub.WatchClusterState(pb.WatchClusterStateRequest(interval_ms=100), timeout=30)):
        if response.state.workers[0].status == status:
            watch.cancel()
            return response.state
    raise AssertionError


async def test_the_state_counts_what_was_served(one: InProcess, stub: AdminServiceStub) -> None:
    before = await until(stub, pb.WORKER_STATUS_SERVING)
    assert (before.num_prompt_tokens, before.num_output_tokens, before.num_requests) == (0, 0, 0)
    async with Client(one.target) as client:
        await collect(client, [5] * 20, SamplingParams(max_tokens=7, n=2))
        completion = await collect(client, [5] * 20, SamplingParams(max_tokens=7))
        assert completion.cached_tokens == 16
        stream = client.generate([5] * 20, SamplingParams(max_tokens=400))
        await anext(stream)
        state = (await stub.GetClusterState(pb.GetClusterStateRequest())).state
        assert state.num_requests == 1
        await stream.aclose()
    assert (state.num_prompt_tokens, state.num_cached_tokens) == (60, 32)
    assert state.num_output_tokens > 21
    assert state.start_time_ms == before.start_time_ms
    assert sum(state.placement.placed.values()) == 3
    (worker,) = state.workers
    assert (worker.connected, worker.draining, worker.last_error, worker.num_losses) == (True, False, "", 0)
    assert worker.num_device_blocks == 64
    assert worker.num_steps == worker.step_split.num_steps > 7
    assert worker.epoch > 0


async def test_the_blocks_of_each_group_of_layers_are_counted(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.info.layer_groups.extend([LayerGroup(block_size=8), LayerGroup(block_size=4, window=6), LayerGroup()])
    async with serving(worker) as address, scheduler(address) as one:
        await one.engine.model()
        async with grpc.aio.insecure_channel(one.admin_target) as channel, Client(one.target) as client:

            async def groups() -> list[tuple[str, int, int]]:
                state = (await AdminServiceStub(channel).GetClusterState(pb.GetClusterStateRequest())).state
                found = state.workers[0].layer_groups
                return [(group.kind, group.num_held_blocks, group.num_cached_blocks) for group in found]

            assert await groups() == [("full", 0, 0), ("window 6", 0, 0), ("states", 0, 0)]
            stream = client.generate([5] * 20, SamplingParams(max_tokens=80))
            await anext(stream)
            worker.runs.clear()
            full, window, states = await groups()
            assert full[1] >= 3
            assert 2 <= window[1] < full[1] * 2
            assert states[1:] == (1, 1), "the states after the prompt are kept"
            worker.runs.set()
            async for _ in stream:
                pass
            cached = len(one.engine.workers.all[0].scheduler.blocks.device.cached)
            found = await groups()
            assert [held for _, held, _ in found] == [0, 0, 0]
            assert all(number for *_, number in found)
            assert sum(number for *_, number in found) == cached


@pytest.mark.usefixtures("impatient")
async def test_a_lost_worker_is_counted_and_says_why(byte_tokenizer_directory: Path) -> None:
    async with scheduler("127.0.0.1:1") as one, grpc.aio.insecure_channel(one.admin_target) as channel:
        worker = FakeWorkerService(byte_tokenizer_directory, poison=99)
        state = await until(AdminServiceStub(channel), pb.WORKER_STATUS_CONNECTING)
        assert not state.workers[0].connected
        async with serving(worker) as address, scheduler(address) as two:
            async with Client(two.target) as client:
                with pytest.raises(grpc.aio.AioRpcError, match="workers failed in a row"):
                    await collect(client, [99])
            async with grpc.aio.insecure_channel(two.admin_target) as other:
                state = (await AdminServiceStub(other).GetClusterState(pb.GetClusterStateRequest())).state
    assert state.num_losses == state.workers[0].num_losses >= 4
    assert state.num_preemptions == 0  # nothing lacked blocks


async def test_a_watch_repeats_the_state_until_it_is_cancelled(stub: AdminServiceStub) -> None:
    watch = stub.WatchClusterState(pb.WatchClusterStateRequest(interval_ms=100))
    states = [(await anext(aiter(watch))).state for _ in range(3)]
    assert len({state.start_time_ms for state in states}) == 1
    watch.cancel()
    assert await watch.code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("interval_ms", [0, 99, 60_001])
async def test_an_interval_out_of_bounds_is_refused(stub: AdminServiceStub, interval_ms: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=rf"interval_ms is {interval_ms}; it must be in \[100, 60000\]") as e:
        await anext(aiter(stub.WatchClusterState(pb.WatchClusterStateRequest(interval_ms=interval_ms))))
    assert e.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_watch_sees_the_scheduler_drain_and_ends_with_it(one: InProcess, stub: AdminServiceStub) -> None:
    watch = aiter(stub.WatchClusterState(pb.WatchClusterStateRequest(interval_ms=60_000)))
    assert not (await anext(watch)).state.draining
    await one.engine.drain(0)
    assert (await stub.GetClusterState(pb.GetClusterStateRequest())).state.draining
    one.admin.close()
    with pytest.raises(grpc.aio.AioRpcError) as error:  # at once, not after the interval
        await asyncio.wait_for(anext(watch), 30)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_drained_worker_is_given_nothing_until_it_is_undrained(one: InProcess, stub: AdminServiceStub) -> None:
    address = (await until(stub, pb.WORKER_STATUS_SERVING)).workers[0].address
    async with Client(one.target) as client:
        before = client.generate([5], SamplingParams(max_tokens=200))
        num_tokens = len((await anext(before)).token_ids)
        await stub.DrainWorker(pb.DrainWorkerRequest(address=address))
        await stub.DrainWorker(pb.DrainWorkerRequest(address=address))
        waiting = asyncio.create_task(collect(client, [5], SamplingParams(max_tokens=3)))
        async for message in before:  # it finishes the requests that it has
            num_tokens += len(message.token_ids)
        assert num_tokens == 200
        state = await until(stub, pb.WORKER_STATUS_DRAINED)
        assert state.workers[0].draining
        assert not state.workers[0].connected
        assert not waiting.done()
        await stub.UndrainWorker(pb.UndrainWorkerRequest(address=address))
        assert len((await waiting).outputs[0].token_ids) == 3
        assert not (await until(stub, pb.WORKER_STATUS_SERVING)).workers[0].draining


async def test_an_unknown_worker_is_not_found(stub: AdminServiceStub) -> None:
    for call in (
        stub.DrainWorker(pb.DrainWorkerRequest(address="nowhere:1")),
        stub.UndrainWorker(pb.UndrainWorkerRequest(address="nowhere:1")),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="nowhere:1") as error:
            await call
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_prefix_cache_is_emptied_while_a_request_goes_on(one: InProcess, stub: AdminServiceStub) -> None:
    async with Client(one.target) as client, Admin(one.admin_target) as admin:
        stream = client.generate([5] * 20, SamplingParams(max_tokens=400))
        num_tokens = len((await anext(stream)).token_ids)
        assert (await collect(client, [5] * 20, SamplingParams(max_tokens=1))).cached_tokens == 16
        assert await admin.reset_prefix_cache() >= 2
        assert (await collect(client, [5] * 20, SamplingParams(max_tokens=1))).cached_tokens == 0
        assert (await collect(client, [5] * 20, SamplingParams(max_tokens=1))).cached_tokens == 16
        async for message in stream:
            num_tokens += len(message.token_ids)
        assert num_tokens == 400
