"""Scheduler and worker processes, on ports that they keep over restarts."""

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

from ports import free_port

from pagewire_client.local import ServiceProcess

WORKER_ARGUMENTS = (
    "--device", "cpu", "--dtype", "float32", "--threads", "1", "--block-size", "8", "--num-gpu-blocks-override", "512",
    "--swap-space", "0.002", "--max-num-batched-tokens", "256", "--max-num-seqs", "64", "--forms",
)  # fmt: skip
START_SECONDS = 120.0


class Member:
    """A service at an address, which can be started, signalled and started again."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        host: str = "127.0.0.1",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.address = f"{host}:{free_port(host)}"
        self._environment = dict(environment or {})
        self._module = module
        self.admin_address, self.http_address = (f"{host}:{free_port(host)}" for _ in range(2))  # of a scheduler
        if module == "scheduler_service":
            arguments = ["--admin-listen", self.admin_address, "--http-listen", self.http_address, *arguments]
        self._arguments = ["--listen", self.address, *arguments]
        self._service: ServiceProcess | None = None

    def start(self) -> "Member":
        """Begin to start; `wait_until_ready` waits for the end."""
        assert not self.is_running
        with patch.dict(os.environ, self._environment):
            self._service = ServiceProcess(self._module, self._arguments)
        return self

    def wait_for(self, event: str, timeout: float = START_SECONDS) -> dict[str, object]:
        """The next log line with this event. Raises ServerError if the process ends first."""
        assert self._service is not None
        return self._service.wait_for(event, timeout)

    @property
    def is_running(self) -> bool:
        return self._service is not None and self._service.process.poll() is None

    @property
    def pid(self) -> int:
        assert self._service is not None
        return self._service.process.pid

    def signal(self, number: signal.Signals) -> None:
        assert self._service is not None
        self._service.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self._service is not None:
            self._service.process.kill()
            self._service.stop()

    def stop(self) -> int:
        """SIGTERM, and SIGKILL after ten seconds; returns the exit status."""
        assert self._service is not None
        return self._service.stop()

    def wait(self, timeout: float = 60.0) -> int:
        """The exit status."""
        assert self._service is not None
        return self._service.process.wait(timeout)


class Workers:
    """Workers of one model, of which the first `count` run in each test.

    With long `step_seconds`, streams that only wait cost little.
    """

    def __init__(self, model: Path, step_seconds: float = 0.0) -> None:
        self._model = model
        self._step_seconds = step_seconds
        self._members: list[Member] = []

    def up(self, count: int) -> list[Member]:
        """The first `count`, all ready; the others are killed."""
        while len(self._members) < count:
            self._members.append(self._new())
        for member in self._members[count:]:
            member.kill()
        members = self._members[:count]
        started = [member.start() for member in members if not member.is_running]
        for member in started:
            member.wait_for("ready")
        return members

    def _new(self) -> Member:
        if self._step_seconds:
            return faulty_worker(self._model, step_seconds=self._step_seconds)
        return worker(self._model)

    def close(self) -> None:
        for member in self._members:
            member.kill()


class Supervisor:
    """Restarts members that end, as a container engine does, until the block is left."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.statuses: list[int] = []
        """Exit statuses of all restarted members."""
        self._members = members
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._watch, args=(member,)) for member in members]

    def __enter__(self) -> "Supervisor":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for member, thread in zip(self._members, self._threads, strict=True):
            member.kill()
            thread.join()

    def _watch(self, member: Member) -> None:
        while True:
            status = member.wait(timeout=600)
            if self._is_over.is_set():
                return
            self.statuses.append(status)
            member.start()


def worker(model: Path, *arguments: str) -> Member:
    """A worker that is not started yet."""
    return Member("worker_service", ["--model", str(model), *WORKER_ARGUMENTS, *arguments])


def faulty_worker(model: Path, *arguments: str, **faults: object) -> Member:
    """A worker with faults: `poison`, a token; `step_seconds`; see faulty_worker.py."""
    environment = {f"PAGEWIRE_TEST_{name.upper()}": str(value) for name, value in faults.items()}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    )
    return Member("faulty_worker", ["--model", str(model), *WORKER_ARGUMENTS, *arguments], environment=environment)


def scheduler(model: Path, addresses: Sequence[str], *arguments: str) -> Member:
    """A scheduler that is not started yet, and that checks its block tables after every step."""
    return Member(
        "scheduler_service",
        ["--model", str(model), "--workers", ",".join(addresses), "--check-invariants", *arguments],
    )
