"""Calls that come while the event loop is busy wait for it, however many they are."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire_common.serving.server import LIVENESS, GrpcServer

NUM_CALLS = 4_000
"""gRPC by itself refuses some from the thousandth that waits, and all from the three thousandth."""


async def test_no_call_is_refused_because_many_came_before_the_loop_had_time() -> None:
    server = GrpcServer([], max_receive_bytes=1 << 20)
    target = await server.start("127.0.0.1:0")
    with grpc.insecure_channel(target) as channel:
        # Nothing here awaits: the server's loop is this one, and stands still until every call has been made.
        grpc.channel_ready_future(channel).result(timeout=60)
        check = health_pb2_grpc.HealthStub(channel).Check
        calls = [check.future(health_pb2.HealthCheckRequest(service=LIVENESS)) for _ in range(NUM_CALLS)]
        answers = await asyncio.to_thread(lambda: [call.result(timeout=120) for call in calls])
    await server.server.stop(None)
    assert {answer.status for answer in answers} == {health_pb2.HealthCheckResponse.SERVING}
