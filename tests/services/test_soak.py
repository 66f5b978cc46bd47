"""Many requests of mixed size, of which many are given up, leave the scheduler as it was after the first of them.

The worker is simulated: it answers at once, with one letter. The scheduler is the real one, behind gRPC. `make soak`
runs 20,000 requests under each policy; `make test` as many as take a few seconds.
"""

import asyncio
import os
import random
from pathlib import Path

import grpc
import pytest
from engines import until
from fake_worker_service import FakeWorkerService as SimulatedWorker
from fake_worker_service import serving
from scheduler_in_process import InProcess, scheduler

from pagewire_client import Client, SamplingParams
from scheduler_service.core import FairQueue, PriorityQueue

NUM_CLIENTS = 32
MAX_MODEL_LEN = 8192
NUM_TENANTS = 20
MAX_STALE = 200  # entries of heaps, which are dropped when most are stale
GROWTH = 32 << 20  # bytes: what the allocator keeps of large requests, which need not be in the first tenth


async def request(client: Client, draw: random.Random, number: int) -> None:
    """A request that is read to its end, given up before or after its first message, aborted, or refused."""
    prompt = [draw.randrange(256)] * draw.choice([1, 20, 300, 2000, 8000])
    n, max_tokens = draw.choice([(1, 1), (1, 20), (1, 200), (4, 20), (1, 100_000)])
    sampling = SamplingParams(max_tokens=max_tokens, n=n)
    if draw.random() < 0.2:
        sampling.stop.extend(["never", "x" * 200])
    if draw.random() < 0.2:
        sampling.allowed_token_ids.extend(range(250))
    end = draw.choice(["read", "read", "read", "left", "left", "abort", "timeout"])
    name, tenant = str(number), f"tenant {draw.randrange(NUM_TENANTS)}"
    timeout = draw.random() / 20 if end == "timeout" else None
    try:
        stream = client.generate(prompt, sampling, request_id=name, tenant=tenant, timeout=timeout)
        async for _ in stream:
            if end == "abort":
                await client.abort(name, tenant=tenant)
            if end == "left":
                await stream.aclose()  # type: ignore[attr-defined]
                return
    except grpc.aio.AioRpcError as error:
        if error.code() not in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.CANCELLED,
        ):
            raise


def sizes(one: InProcess) -> dict[str, int]:
    """The sizes of everything that grows with requests, while there are none."""
    engine, link, waiting = one.engine, one.link, one.engine.requests.waiting
    connections = engine.front_ends.connections
    (core,) = engine.workers.serving
    found = {
        "requests": len(engine.requests.in_flight),
        "requests being checked": len(engine.requests.admission.being_checked),
        "bytes held": engine.requests.admission.num_bytes,
        "calls beside Generate": engine.requests.admission._side_calls._num_calls,
        "requests of the front end": len(link.requests.by_call),
        "outputs of the front end": len(link.requests._by_output),
        "answers that are awaited": len(link.connection._questions),
        "said and not sent": len(link.connection._events),
        "unread bytes": link.requests.unread.num_bytes,
        "front ends": len(connections),
        "calls of front ends": sum(len(connection._calls) for connection in connections),
        "told and not sent": sum(len(connection.outbox) for connection in connections),
        "waiting": len(waiting),
        "running": len(core.running),
        "swapped": len(core.swapped),
        "groups by id": len(core._groups._by_id),
        "ends to tell": len(core._groups._finished) + len(core._groups._preempted),
        "tables": len(core.blocks.tables) + len(core.blocks.host_tables),
        "blocks held": core.blocks.device.num_blocks - core.blocks.device.num_free,
        "turns": link.requests.turns.num_held + len(link.requests.turns._asking),
        "sessions": len(engine.workers.serving) + len(waiting.balancer),
        "tasks": len(asyncio.all_tasks()),
        "open files": len(os.listdir("/proc/self/fd")),
        "arrivals": max(0, len(waiting._arrivals) - MAX_STALE),
        "entries of workers": max(0, len(waiting.balancer._lightest) - MAX_STALE),
        "kinds of ends": len(link.requests.counts.total.num_outputs),
    }
    if isinstance(waiting, FairQueue):
        found["tenants"] = max(0, len(waiting.counters) - NUM_TENANTS) + len(waiting._tenants)
        found["entries of tenants"] = max(0, len(waiting._heap) - MAX_STALE)
    if isinstance(waiting, PriorityQueue):
        found["ranks"] = max(0, len(waiting._ranks) - MAX_STALE)
    return found


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
async def test_requests_that_are_over_leave_nothing(
    pytestconfig: pytest.Config, byte_tokenizer_directory: Path, policy: str
) -> None:
    is_long = bool(pytestconfig.getoption("--soak", default=False))
    num_requests = 20_000 if is_long else 200
    worker = SimulatedWorker(byte_tokenizer_directory, num_device_blocks=4096)
    worker.info.max_model_len = MAX_MODEL_LEN
    worker.info.max_num_batched_tokens = 2048
    async with (
        serving(worker) as address,
        scheduler(address, time_limit=1800, scheduling_policy=policy, check_invariants=False) as one,
        Client(one.target, retry_for=0) as client,
    ):
        numbers = iter(range(num_requests))

        async def send(last: int) -> None:
            for number in numbers:
                await request(client, random.Random(number), number)
                if number >= last:
                    return

        first: tuple[dict[str, int], int] | None = None
        for tenth in range(1, 11):
            last = tenth * num_requests // 10 - 1
            await asyncio.gather(*(send(last) for _ in range(NUM_CLIENTS)))
            await until(lambda: not one.engine.requests.in_flight and not one.link.requests.turns.num_held)
            await until(lambda: not one.engine.requests.admission._side_calls._num_calls)  # of the last call of Abort
            (core,) = one.engine.workers.serving
            await until(lambda core=core: not core.has_work and not core.steps_in_flight)
            now = sizes(one), resident_bytes()
            if is_long:
                print(f"{policy}, {last + 1} requests: {now[1] >> 20} MiB, {now[0]}")  # noqa: T201
            if first is None:
                first = now
            names = first[0].keys() - {"tasks", "open files"}
            assert {name: now[0][name] for name in names} == {name: first[0][name] for name in names}
            assert now[0]["tasks"] <= first[0]["tasks"] + NUM_CLIENTS
            assert now[0]["open files"] <= first[0]["open files"] + 5  # gRPC opens some of its own when it likes
            assert now[1] <= first[1] + GROWTH
