"""A real worker in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.v1.worker_service_pb2_grpc import add_WorkerServiceServicer_to_server
from pagewire_common.server import GrpcServer
from worker_service.execution.worker import Worker, load_worker
from worker_service.serving.device_thread import DeviceThread
from worker_service.serving.servicer import WorkerServicer
from worker_service.settings import WorkerSettings


@dataclass
class ServedWorker:
    """It ends for its scheduler when its server is stopped."""

    address: str
    server: GrpcServer
    worker: Worker


@asynccontextmanager
async def worker_in_process(model: Path, listen: str = "127.0.0.1:0", **settings: Any) -> AsyncIterator[ServedWorker]:
    """Of a small cache, unless the settings say otherwise."""
    sizes = {"block_size": 8, "num_device_blocks": 128, "swap_space": 0.002, "threads": 1, "forms": False}
    worker = load_worker(WorkerSettings(**{"model": str(model)} | sizes | settings))
    server = GrpcServer([], max_receive_bytes=64 << 20)
    servicer = WorkerServicer(DeviceThread())
    add_WorkerServiceServicer_to_server(servicer, server.server)
    servicer.set_ready(worker)
    address = await server.start(listen)
    await server.set_serving(True)
    try:
        yield ServedWorker(address, server, worker)
    finally:
        await server.server.stop(None)
