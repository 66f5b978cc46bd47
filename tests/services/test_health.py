"""Health is open to every caller, and no caller keeps it from another."""

import asyncio

import grpc
from engines import until
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from bench.fleet.http2 import Connection
from pagewire_common.serving.server import GrpcServer


async def test_a_watcher_that_does_not_read_keeps_health_from_no_other() -> None:
    server = GrpcServer(["a.Service"], max_receive_bytes=1 << 20)
    target = await server.start("127.0.0.1:0")
    host, _, port = target.rpartition(":")
    transport, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection("/grpc.health.v1.Health/Watch", lambda *_: None, lambda _: None, window=0), host, int(port)
    )
    try:
        connection.begin(HealthCheckRequest(service="a.Service").SerializeToString())
        await until(lambda: server._health._num_watches == 1)
        async with grpc.aio.insecure_channel(target) as channel:
            stub, request = HealthStub(channel), HealthCheckRequest(service="a.Service")
            watch = stub.Watch(request, timeout=30)
            for serving in (False, True, False):  # the first is what it is already
                await server.set_serving(serving)
                status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
                assert (await watch.read()).status == status
                assert (await stub.Check(request, timeout=30)).status == status
            watch.cancel()
        assert not connection.num_messages
    finally:
        transport.abort()
        await server.server.stop(None)
