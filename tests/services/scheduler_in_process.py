"""The scheduler's services in this process, on a free port, in front of fake workers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engines import running

from pagewire.v1.admin_service_pb2_grpc import add_AdminServiceServicer_to_server
from pagewire.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from pagewire_common.server import GrpcServer
from scheduler_service.admin_servicer import AdminServicer
from scheduler_service.engine import Engine
from scheduler_service.servicer import InferenceServicer


@dataclass
class InProcess:
    engine: Engine
    admin: AdminServicer
    target: str


@asynccontextmanager
async def scheduler(*workers: str, listen: str = "127.0.0.1:0", **settings: object) -> AsyncIterator[InProcess]:
    async with running(*workers, **settings) as engine:
        server = GrpcServer([], max_receive_bytes=16 << 20, max_request_bytes=lambda: engine.max_request_bytes)
        admin = AdminServicer(engine)
        add_AdminServiceServicer_to_server(admin, server.server)
        add_InferenceServiceServicer_to_server(InferenceServicer(engine), server.server)
        target = await server.start(listen)
        try:
            yield InProcess(engine, admin, target)
        finally:
            await server.server.stop(None)
