"""Services that a fork server starts, in a tenth of the time of `python -m`.

PAGEWIRE_TEST_TRUE_STARTS=1, and the fixture `true_starts`, start services by `python -m`.
"""

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from fork_server import STATUS, Start, ask

from pagewire_client import local

true_start = local.start_process
_WORKER = ("worker_service.__main__", "worker_service.execution.worker")
_SCHEDULER = ("scheduler_service.__main__", "scheduler_service.processes.keeper", "scheduler_service.server")
FRONT_END = ("scheduler_service.frontend.__main__", "scheduler_service.frontend.server")
IMPORTS = {"worker_service": _WORKER, "faulty_worker": _WORKER, "scheduler_service": _SCHEDULER}
"""Modules imported before the fork, by the module that is run. Front ends are forked for forked schedulers."""
_READ_AT_THE_START = ("PAGEWIRE_", "PYTHONPATH", "PYTEST_", "OTEL_", "TORCHINDUCTOR_CACHE_DIR")
"""Prefixes of variables that no import reads, so that they may differ from the fork server's. OpenTelemetry is imported
only for spans; torch sets the last one in processes of tests.
"""


class ForkedProcess:
    """The part of subprocess.Popen that tests need, for a forked child."""

    def __init__(self, module: str, status: int, stderr: int) -> None:
        self.returncode: int | None = None
        self.stderr = os.fdopen(stderr, errors="replace")
        self._module = module
        self._status = status
        self._one_reads = threading.Lock()
        weakref.finalize(self, os.close, status)
        self.pid = self._read()

    def poll(self) -> int | None:
        return self.wait(0) if self._has_ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._has_ended(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._module, timeout)
        with self._one_reads:
            if self.returncode is None:
                self.returncode = self._read()
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        return self.returncode is not None or bool(poll.poll(None if timeout is None else timeout * 1000))

    def _read(self) -> int:
        if not (message := os.read(self._status, STATUS.size)):
            raise RuntimeError(f"the fork server that started {self._module} has ended; its stderr says why")
        return int(STATUS.unpack(message)[0])

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, which is told in a moment
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(9)


class ForkServer:
    """The fork server for these imports, started at once, and ready with its first process.

    Its children have their front ends from `front_ends`, if given.
    """

    def __init__(self, imports: Sequence[str], front_ends: "ForkServer | None" = None) -> None:
        self.environment = dict(os.environ)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(theirs.fileno()), *imports]
        inherited = [theirs.fileno()]
        if front_ends is not None:
            inherited.append(front_ends.control.fileno())
            command.append(f"--front-ends={inherited[-1]}")
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env={name: value for name, value in self.environment.items() if name != "PYTHONPATH"}
                | {"PYTHONUNBUFFERED": "1"},
                pass_fds=inherited,
                start_new_session=True,
            )

    def start(self, module: str, arguments: Sequence[str]) -> ForkedProcess:
        """`python -m MODULE` with stderr on a pipe, in this process's environment and folder."""
        start = Start(module, list(arguments), os.environ | {"PYTHONUNBUFFERED": "1"}, os.getcwd())
        stderr, their_stderr = os.pipe()
        stdin = os.open(os.devnull, os.O_RDONLY)
        try:
            status = ask(self.control, start, [stdin, 1, their_stderr])
        finally:
            for descriptor in (stdin, their_stderr):
                os.close(descriptor)
        return ForkedProcess(module, status, stderr)

    def close(self) -> None:
        """End it, and kill its children."""
        self.control.close()
        self._process.wait()


class ForkServers:
    """A fork server for each set of imports, from its first use."""

    def __init__(self) -> None:
        self._servers: dict[Sequence[str], ForkServer] = {}
        self._one_looks = threading.Lock()

    def start(self, module: str, arguments: Sequence[str]) -> "ForkedProcess | subprocess.Popen[str]":
        """Replaces local.start_process. An environment that imports may read differently needs a true start."""
        if (imports := IMPORTS.get(module)) is None:
            return true_start(module, arguments)
        with self._one_looks:
            server = self._server(imports)
        if _read_by_imports(os.environ) != _read_by_imports(server.environment):
            return true_start(module, arguments)
        return server.start(module, arguments)

    def _server(self, imports: Sequence[str]) -> ForkServer:
        if (server := self._servers.get(imports)) is None:
            front_ends = self._server(FRONT_END) if imports == _SCHEDULER else None
            server = self._servers[imports] = ForkServer(imports, front_ends)
        return server

    def close(self) -> None:
        for server in reversed(self._servers.values()):  # that of front ends ends when no scheduler may ask it
            server.close()


def _read_by_imports(environment: "os._Environ[str] | dict[str, str]") -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_READ_AT_THE_START)}
