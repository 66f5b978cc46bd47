"""A process of `--count` workers that sleep `--step-ms` in each step: python -m bench.fleet.sleeping_workers.

Each has its own port. The counters that child.py reports are by address.
"""

import argparse
import asyncio
from dataclasses import asdict
from pathlib import Path

import grpc

from bench.fleet.child import report
from bench.fleet.sleeping_servicer import SleepingWorkerService
from pagewire.v1.worker_service_pb2_grpc import add_WorkerServiceServicer_to_server
from pagewire_common.serving.server import OPTIONS


async def serve(count: int, directory: Path, step_seconds: float) -> None:
    """Serve all workers until stdin ends."""
    services: dict[str, SleepingWorkerService] = {}
    servers = []
    for _ in range(count):
        service = SleepingWorkerService(directory, step_seconds)
        server = grpc.aio.server(options=OPTIONS)
        add_WorkerServiceServicer_to_server(service, server)
        services[f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"] = service
        await server.start()
        servers.append(server)
    await report(lambda: {address: asdict(service.counters) for address, service in services.items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--step-ms", type=float, default=20.0)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.count, arguments.model, arguments.step_ms / 1000))
