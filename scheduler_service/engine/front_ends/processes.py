"""Starts front ends' processes, and restarts a process that ends."""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence, Set

import structlog

log = structlog.get_logger()

FIRST_PAUSE_SECONDS = 0.1
LAST_PAUSE_SECONDS = 5.0
END_SECONDS = 5.0
MAX_DEAF_SECONDS = 60.0
"""Seconds without listening after which a front end is killed; its start takes seconds on a busy machine."""


async def start_process(arguments: Sequence[str]) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "scheduler_service.frontend", *arguments]
    return await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True)


class FrontEndProcesses:
    """`count` processes, until `run` ends."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: set[asyncio.subprocess.Process] = set()
        self._is_over = False

    async def run(self, arguments: Sequence[str], listens: Callable[[int], bool]) -> None:
        """Keep the processes running until cancelled, or until `stop`. `listens`: whether a process id listens."""
        await asyncio.gather(*(self._keep(arguments, listens) for _ in range(self._count)))

    async def _keep(self, arguments: Sequence[str], listens: Callable[[int], bool]) -> None:
        pause, loop = FIRST_PAUSE_SECONDS, asyncio.get_running_loop()
        while not self._is_over:
            began = loop.time()
            try:
                process = await start_process(arguments)
            except OSError as error:  # the system has no memory left, or runs too many processes
                log.error("front end could not be started", reason=error.strerror or str(error))
            else:
                self._processes.add(process)
                status = await _end(process, listens)
                self._processes.discard(process)
                if self._is_over:
                    return
                log.warning("front end ended and is started again", status=status)
            pause = (
                FIRST_PAUSE_SECONDS if loop.time() - began > LAST_PAUSE_SECONDS else min(2 * pause, LAST_PAUSE_SECONDS)
            )
            await asyncio.sleep(pause)

    @property
    def process_ids(self) -> set[int]:
        return {process.pid for process in self._processes}

    def kill(self, process_id: int) -> None:
        """A process id of no front end is ignored."""
        for process in self._processes:
            if process.pid == process_id:
                _kill(process)

    async def stop(self, told: Set[int]) -> None:
        """Wait for the processes `told` to end, kill others at once, and kill all after END_SECONDS."""
        self._is_over = True
        processes = list(self._processes)
        for process in processes:
            if process.pid not in told:
                _kill(process)
        if processes:
            await asyncio.wait([asyncio.ensure_future(p.wait()) for p in processes], timeout=END_SECONDS)
        for process in processes:
            if process.returncode is None:
                _kill(process)
                await process.wait()


async def _end(process: asyncio.subprocess.Process, listens: Callable[[int], bool]) -> int:
    """Exit status of a process, which is killed if it does not listen for MAX_DEAF_SECONDS."""
    while True:
        try:
            return await asyncio.wait_for(process.wait(), MAX_DEAF_SECONDS)
        except TimeoutError:
            if not listens(process.pid):
                log.error("front end does not listen and is ended", seconds=MAX_DEAF_SECONDS)
                _kill(process)
                return await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process has ended meanwhile
        process.kill()
