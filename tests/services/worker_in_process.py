"""A real worker in this process."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import until

from pagewire.v1.worker_service_pb2_grpc import add_WorkerServiceServicer_to_server
from pagewire_common.serving.server import GrpcServer
from worker_service.execution.worker import Worker, load_worker
from worker_service.serving.device_thread import DeviceThread
from worker_service.serving.servicer import WorkerServicer
from worker_service.settings import WorkerSettings


@dataclass
class ServedWorker:
    """A worker that its scheduler loses when the server is stopped."""

    address: str
    server: GrpcServer
    worker: Worker
    servicer: WorkerServicer


@asynccontextmanager
async def worker_in_process(model: Path, listen: str = "127.0.0.1:0", **settings: Any) -> AsyncIterator[ServedWorker]:
    """A small cache by default."""
    sizes = {"block_size": 8, "num_gpu_blocks_override": 128, "swap_space": 0.002, "threads": 1, "forms": False}
    worker = load_worker(WorkerSettings(**{"model": str(model)} | sizes | settings))
    server = GrpcServer([], max_receive_bytes=64 << 20)
    servicer = WorkerServicer(DeviceThread())
    add_WorkerServiceServicer_to_server(servicer, server.server)
    servicer.set_ready(worker)
    address = await server.start(listen)
    await server.set_serving(True)
    try:
        yield ServedWorker(address, server, worker, servicer)
    finally:
        await server.server.stop(None)


def slow_down(worker: ServedWorker, seconds: float) -> None:
    """Lengthen each step."""
    runner, launch = worker.worker.runner, worker.worker.runner.launch

    def slowly(*arguments: Any) -> Any:
        time.sleep(seconds)
        return launch(*arguments)

    runner.launch = slowly  # type: ignore[method-assign]


@asynccontextmanager
async def held_until(worker: ServedWorker, condition: Callable[[], object]) -> AsyncIterator[None]:
    """Compute no step before the condition, so that all requests are in flight before one ends."""
    runner, launch, come = worker.worker.runner, worker.worker.runner.launch, threading.Event()

    def held(*arguments: Any) -> Any:
        come.wait()
        return launch(*arguments)

    async def release() -> None:
        await until(condition)
        come.set()

    runner.launch = held  # type: ignore[method-assign]
    releasing = asyncio.create_task(release())
    try:
        yield
    finally:
        releasing.cancel()
        come.set()
        runner.launch = launch  # type: ignore[method-assign]
