"""Clients that cost others nothing: calls that read nothing or little, and connections that never send."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from fleet_helpers import Fleet, Scale, Serve
from load import Load
from processes import Workers, faulty_worker

from bench.fleet.http2 import Connection
from bench.fleet.raw_load import PATH
from pagewire.v1 import inference_service_pb2 as pb


async def never_read(stack: AsyncExitStack, fleet: Fleet, count: int) -> None:
    """Calls whose client opens no window for their answers, all on one connection, until the stack is left."""
    host, _, port = fleet.scheduler.address.rpartition(":")
    transport, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection(PATH, lambda *_: None, lambda _: None, window=0), host, int(port)
    )
    stack.callback(transport.abort)
    for number in range(count):
        sampling = pb.SamplingParams(max_tokens=400, n=2, temperature=1.0, logprobs=20, ignore_eos=True)
        connection.begin(pb.GenerateRequest(text=f"Unread {number}", sampling=sampling).SerializeToString())


def never_send(stack: AsyncExitStack, address: str, count: int) -> None:
    """Connections on which nothing is ever sent."""
    host, _, port = address.rpartition(":")
    for _ in range(count):
        stack.enter_context(socket.create_connection((host, int(port))))


async def test_others_are_served_beside_readers_that_never_read_and_connections_that_never_send(
    workers: Workers, serve: Serve, scale: Scale
) -> None:
    """An unread stream ends after the stall limit, or is small enough to be kept; either way its blocks are free."""
    members = workers.up(2)
    # Long enough that on a slow machine all of them are seen in flight at once before the first ends.
    fleet = await serve([member.address for member in members], "--stall-timeout", "5")
    async with AsyncExitStack() as stack:
        never_send(stack, fleet.scheduler.address, scale(300, 1000))
        never_send(stack, members[0].address, scale(100, 1000))
        async with fleet.load() as load:
            await load.gain(100)
            count = scale(4, 32)
            served = len(load.requests)
            await never_read(stack, fleet, count)
            await fleet.until(lambda state: state.num_requests >= served + count)
            await load.gain(scale(500, 20_000))
        await fleet.check_empty()


@asynccontextmanager
async def slow_readers(address: str, count: int, num_bytes: int) -> AsyncIterator[None]:
    """Calls whose client reads so many bytes of each five times a second; with 0, nothing ever."""
    host, _, port = address.rpartition(":")
    transport, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection(PATH, lambda *_: None, lambda _: None, window=0), host, int(port)
    )
    for number in range(count):
        sampling = pb.SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
        connection.begin(pb.GenerateRequest(text=f"Slow {number}", sampling=sampling).SerializeToString())

    async def read() -> None:
        while num_bytes:
            await asyncio.sleep(0.2)  # that is how slow they are
            connection.widen(num_bytes)

    reading = asyncio.create_task(read())
    try:
        yield
    finally:
        reading.cancel()
        transport.abort()


@pytest.mark.alone
async def test_clients_that_read_slowly_or_nothing_or_send_nothing_do_not_slow_others(
    model: Path, serve: Serve, scale: Scale
) -> None:
    """Steps take a known time, so a token that other clients miss is one that the scheduler did not send in time."""
    worker = faulty_worker(model, step_seconds=0.05).start()
    least = 0.9 if scale.is_full else 0.75
    try:
        await asyncio.to_thread(worker.wait_for, "ready")
        fleet = await serve([worker.address])
        async with Load(fleet.client, fleet.streamed[:6], fleet.expected) as load:
            await load.gain(50)
            _, alone = await load.rates(scale(150, 1500))
            async with AsyncExitStack() as stack:
                never_send(stack, fleet.scheduler.address, scale(300, 1000))
                for num_bytes in (40, 0):
                    await stack.enter_async_context(slow_readers(fleet.scheduler.address, 12, num_bytes))
                await fleet.until(lambda state: state.num_requests >= 24)
                _, beside = await load.reach(lambda _, messages: messages > least * alone, scale(150, 1500))
        print(f"messages a second alone: {alone:.1f}, beside idle clients: {beside:.1f}")  # noqa: T201
        assert beside > least * alone
        await fleet.check_empty()
    finally:
        worker.kill()
