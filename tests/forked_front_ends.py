"""Front ends that a fork server starts for a forked scheduler, in a tenth of the time of `python -m`.

The fork server ends them with their scheduler, as the system does.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Sequence

from fork_server import STATUS, Start, ask

from scheduler_service.engine.front_ends import processes as front_end_processes

MODULE = "scheduler_service.frontend"


class ForkedFrontEnd:
    """The part of asyncio.subprocess.Process that an engine needs, for a forked child."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ending = asyncio.ensure_future(self._read_end(status))

    async def _read_end(self, status: int) -> int:
        try:
            self.returncode = await _next(status)
        finally:
            os.close(status)
        return self.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._ending)

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, which is told in a moment
                os.kill(self.pid, signal.SIGKILL)


def fork_front_ends(control: socket.socket) -> None:
    """Have the engine of this process, or of its children, ask this fork server for front ends."""

    async def start(arguments: Sequence[str]) -> ForkedFrontEnd:
        request = Start(MODULE, list(arguments), dict(os.environ), os.getcwd(), ends_with_reader=True)
        stdin = os.open(os.devnull, os.O_RDONLY)
        try:
            status = ask(control, request, [stdin, 1, 2])
        finally:
            os.close(stdin)
        try:
            return ForkedFrontEnd(await _next(status), status)
        except BaseException:
            os.close(status)
            raise

    front_end_processes.start_process = start  # type: ignore[assignment]


async def _next(status: int) -> int:
    is_there = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(status, is_there.set)
    try:
        await is_there.wait()
    finally:
        loop.remove_reader(status)
    if not (message := os.read(status, STATUS.size)):
        raise RuntimeError("the fork server of front ends has ended; its stderr says why")
    return int(STATUS.unpack(message)[0])
