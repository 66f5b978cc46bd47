"""Runs expensive work (limited_work.py) in a process that the kernel kills at a limit of CPU time or memory."""

import asyncio
import contextlib
import socket
import struct
import subprocess
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeVar

import grpc
import structlog

from pagewire_common.calls.errors import RequestError
from pagewire_common.processes.child_process import start_child
from scheduler_service.frontend.limited.limited_work import LIMITS, Outcome

log = structlog.get_logger()

T = TypeVar("T")

MAX_STARTS = 2
"""Starts of the process for one piece of work, which may be the cause if the process is killed twice."""
DEAF_SECONDS = 30
"""Seconds without an answer after which a process counts as stuck. Usual: 0.1 s to start; every CPU limit is lower."""


class Limits(NamedTuple):
    """CPU seconds, and data bytes of the process."""

    seconds: float
    num_bytes: int


class LimitError(ValueError):
    """The work exceeded a limit. The caller appends the kind of work, such as "to render"."""


class LimitedProcess:
    """A process `python -m MODULE`, for one thread, that starts with its first piece of work, and again after it was
    killed.

    `does`: describes the work in errors, such as "compiles forms". `setup`: bytes for a new process; may be empty.
    """

    def __init__(self, module: str, does: str, setup: bytes = b"") -> None:
        self._module, self._does, self._setup = module, does, setup
        self._connection: Connection | None = None
        self._end: weakref.finalize[..., LimitedProcess]

    def ask(self, message: bytes, limits: Limits) -> bytes:
        """Send a piece of work and return the answer. Raises LimitError or RequestError."""
        for _ in range(MAX_STARTS):
            try:
                connection = self._connection or self._start()
                connection.send_bytes(LIMITS.pack(*limits))
                connection.send_bytes(message)  # apart, because a copy of 16 MB would hold the GIL for 10 ms
                reply = connection.recv_bytes()
                break
            except (OSError, EOFError) as error:
                log.warning(f"the process that {self._does} is restarted", reason=str(error) or "it was killed")
                self.close()
        else:
            raise RequestError(
                grpc.StatusCode.UNAVAILABLE,
                f"the process that {self._does} was killed or did not answer; try again",
            )
        match Outcome(reply[0]):
            case Outcome.TOO_LONG:
                raise LimitError(f"it takes more than {limits.seconds:.2g} s of CPU time")
            case Outcome.TOO_MUCH_MEMORY:
                raise LimitError(f"it takes more than {limits.num_bytes >> 20} MiB of memory")
            case Outcome.TOO_DEEP:
                raise LimitError("it is nested too deeply")
        return reply[1:]

    def close(self) -> None:
        if self._connection is not None:
            self._connection = None
            self._end()

    def _start(self) -> Connection:
        process, control = start_child(self._module)
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            control.setsockopt(socket.SOL_SOCKET, direction, struct.pack("@ll", DEAF_SECONDS, 0))
        self._connection = Connection(control.detach())
        self._end = weakref.finalize(self, _end, process, self._connection)
        if self._setup:
            self._connection.send_bytes(self._setup)
        return self._connection


class LimitedProcesses:
    """Several processes for the same kind of work, each with a thread. Work waits in a queue while all are busy."""

    def __init__(self, number: int, module: str, does: str, setup: bytes = b"") -> None:
        self._threads = ThreadPoolExecutor(number, module.rpartition(".")[2])
        self._idle = [LimitedProcess(module, does, setup) for _ in range(number)]

    async def run(self, work: Callable[[LimitedProcess], T]) -> T:
        waiting = [work]
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, waiting)
        finally:
            waiting.clear()  # so that the queue does not keep the data of a cancelled call

    def _run(self, waiting: list[Callable[[LimitedProcess], T]]) -> T:
        process = self._idle.pop()  # the last used, so that others may never need to start
        try:
            return waiting.pop()(process)
        finally:
            self._idle.append(process)


def _end(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    connection.close()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()
