"""A client that is frozen keeps nothing of the server's memory for ever."""

import asyncio
from typing import Any

import grpc
import pytest

from bench.fleet.http2 import Connection
from pagewire_common.serving import server as server_module
from pagewire_common.serving.server import GrpcServer


async def test_the_answer_that_a_frozen_client_does_not_read_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second until it is pinged and another to answer, instead of a minute each.

    Pings that measure the connection are off: this client would not answer them either.
    """
    minute = dict(server_module.OPTIONS)["grpc.keepalive_time_ms"]
    sooner = {"grpc.keepalive_time_ms": minute // 600, "grpc.http2.ping_timeout_ms": 100, "grpc.http2.bdp_probe": 0}
    monkeypatch.setattr(server_module, "OPTIONS", tuple((dict(server_module.OPTIONS) | sooner).items()))
    answered, over = asyncio.Event(), asyncio.Event()

    async def answer(request: bytes, context: Any) -> bytes:
        context.add_done_callback(lambda _: over.set())
        answered.set()
        return bytes(1_500_000)

    server = GrpcServer([], max_receive_bytes=1 << 20)
    handlers = {"Answer": grpc.unary_unary_rpc_method_handler(answer)}
    server.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", handlers)])
    host, _, port = (await server.start("127.0.0.1:0")).rpartition(":")
    transport, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection("/test/Answer", lambda *_: None, lambda _: None, window=0), host, int(port)
    )
    try:
        transport.pause_reading()
        connection.begin(b"")
        async with asyncio.timeout(30):
            await answered.wait()
            await over.wait()
    finally:
        transport.abort()
        await server.server.stop(None)
