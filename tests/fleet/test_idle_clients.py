"""Clients that cost others nothing: calls that never read, and connections that never send."""

import asyncio
import socket
from contextlib import AsyncExitStack

from fleet_helpers import Fleet, Scale, Serve
from processes import Workers

from bench.fleet.http2 import Connection
from bench.fleet.raw_load import PATH
from pagewire.v1 import inference_service_pb2 as pb


async def never_read(stack: AsyncExitStack, fleet: Fleet, count: int) -> None:
    """Calls whose client opens no window for what they say, all on one connection, until the stack is left."""
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
    """What nobody reads ends after the stall limit, or is small enough to be kept; either way its blocks are free."""
    members = workers.up(2)
    fleet = await serve([member.address for member in members], "--stall-timeout", "1")
    async with AsyncExitStack() as stack:
        never_send(stack, fleet.scheduler.address, scale(300, 1000))
        never_send(stack, members[0].address, scale(100, 1000))
        async with fleet.load() as load:
            await load.gain(100)
            count = scale(4, 32)
            served = len(load.requests)
            await never_read(stack, fleet, count)
            await fleet.until(lambda state: state.num_requests >= served + count)
            await load.gain(scale(1000, 20_000))
        await fleet.check_empty()
