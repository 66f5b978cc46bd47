"""The bench's own client of gRPC against gRPC's server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from bench.fleet.http2 import Connection

METHOD = "/bench.Test/Count"
SIZES = (0, 1, 100, 20_000)


async def count(request: bytes, context: Any) -> AsyncIterator[bytes]:
    """As many messages as the request has bytes, or an error when it has none."""
    if not request:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "nothing to count")
    for number in range(len(request)):
        yield bytes([number]) * SIZES[number % len(SIZES)]


async def calls(*requests: bytes) -> tuple[Connection, list[tuple[bytes, bytes]]]:
    """Make calls on one connection; returns it and, as they ended, their last messages and trailers."""
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(count)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Test", {"Count": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ended: list[tuple[bytes, bytes]] = []
    all_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(_: Connection, message: bytes, trailers: bytes) -> None:
        ended.append((message, trailers))
        if len(ended) == len(requests):
            all_ended.set_result(None)

    def fail(error: Exception) -> None:
        if not all_ended.done():
            all_ended.set_exception(error)

    transport, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection(METHOD, end, fail), "127.0.0.1", port
    )
    for request in requests:
        connection.begin(request)
    await asyncio.wait_for(all_ended, 30)
    transport.abort()
    await server.stop(None)
    return connection, ended


async def test_every_message_is_counted_and_the_last_one_kept_however_they_are_cut_into_frames() -> None:
    connection, ended = await calls(b"." * 3, b"." * 252, b"." * 2)
    assert connection.num_messages == 257
    assert sorted(len(message) for message, _ in ended) == [1, 100, 20_000]


async def test_an_error_is_a_call_without_messages_whose_trailers_say_why() -> None:
    _, ((message, trailers),) = await calls(b"")
    assert message == b""
    assert b"nothing to count" in trailers
