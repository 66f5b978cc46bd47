"""A process with several simulated workers that sleep instead of computing: python -m bench.fleet.sleeping_workers.

The process serves WorkerService for `--count` workers, each on its own port. Every step takes `--step-ms` milliseconds,
whatever its size. The process reports the counters of each worker, by the worker's address, as child.py describes. The
counts of a period are the difference of two reports.
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
    """Serve all simulated workers until stdin ends."""
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
