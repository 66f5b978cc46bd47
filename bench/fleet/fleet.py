"""A scheduler and several workers as child processes. A worker can be killed and restarted at its address."""

import asyncio
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from bench.loads.drive import BenchError
from pagewire.v1.admin_service_pb2 import (
    ClusterState,
    DrainWorkerRequest,
    GetClusterStateRequest,
    UndrainWorkerRequest,
)
from pagewire.v1.admin_service_pb2_grpc import AdminServiceStub
from pagewire_client.local import ADMIN, ServiceProcess
from pagewire_common.connection.channel import open_channel

START_SECONDS = 300.0


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Fleet:
    """A scheduler and its workers, until `stop`. Raises ServerError if a process does not start."""

    def __init__(
        self,
        model: Path,
        num_workers: int,
        worker_arguments: Sequence[str] = (),
        scheduler_arguments: Sequence[str] = (),
    ) -> None:
        self._worker_arguments = ["--model", str(model), *worker_arguments]
        self.workers: dict[str, ServiceProcess] = {}
        self._scheduler: ServiceProcess | None = None
        try:
            for _ in range(num_workers):
                self._start(free_address())
            for worker in self.workers.values():
                worker.wait_for("ready", START_SECONDS)
            self._scheduler = ServiceProcess(
                "scheduler_service",
                ["--listen", "127.0.0.1:0", *ADMIN, "--model", str(model), "--workers", ",".join(self.workers),
                 *scheduler_arguments],
            )  # fmt: skip
            self.admin_target = str(self._scheduler.wait_for("admin listening", START_SECONDS)["address"])
            self.target = str(self._scheduler.wait_for("listening", START_SECONDS)["address"])
            for _ in range(num_workers):
                self._scheduler.wait_for("worker connected", START_SECONDS)
        except BaseException:
            self.stop()
            raise

    def _start(self, address: str) -> None:
        self.workers[address] = ServiceProcess("worker_service", ["--listen", address, *self._worker_arguments])

    def kill(self, address: str) -> None:
        """Send SIGKILL, without waiting for the end of the process."""
        self.workers[address].process.send_signal(signal.SIGKILL)

    def restart(self, address: str) -> None:
        """Restart a killed worker, and wait for its session."""
        assert self._scheduler is not None
        self.workers[address].stop()
        self._start(address)
        self.workers[address].wait_for("ready", START_SECONDS)
        while self._scheduler.wait_for("worker connected", START_SECONDS)["worker"] != address:
            pass

    def pids(self) -> list[int]:
        return [*(worker.process.pid for worker in self.workers.values()), self.scheduler_pid]

    @property
    def scheduler_pid(self) -> int:
        assert self._scheduler is not None
        return self._scheduler.process.pid

    async def state(self) -> ClusterState:
        async with open_channel(self.admin_target, None) as channel:
            return (await AdminServiceStub(channel).GetClusterState(GetClusterStateRequest())).state

    async def give_nothing_to(self, address: str) -> None:
        async with open_channel(self.admin_target, None) as channel:
            await AdminServiceStub(channel).DrainWorker(DrainWorkerRequest(address=address))

    async def give_again_to(self, address: str) -> None:
        """End the drain of a worker. Raises BenchError if it has no session within a minute."""
        async with open_channel(self.admin_target, None) as channel:
            await AdminServiceStub(channel).UndrainWorker(UndrainWorkerRequest(address=address))
        assert self._scheduler is not None
        for _ in range(600):
            if any(worker.address == address and worker.connected for worker in (await self.state()).workers):
                return
            await asyncio.sleep(0.1)
        raise BenchError(f"the worker at {address} did not come back")

    def stop(self) -> None:
        for service in (self._scheduler, *self.workers.values()):
            if service is not None:
                service.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
