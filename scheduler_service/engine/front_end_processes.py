"""The front ends' processes: started with the engine, and again when one ends."""

import asyncio
import sys
from collections.abc import Sequence, Set

import structlog

log = structlog.get_logger()

FIRST_PAUSE_SECONDS = 0.1
LAST_PAUSE_SECONDS = 5.0
END_SECONDS = 5.0


class FrontEndProcesses:
    """`count` processes, while `run` runs."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: set[asyncio.subprocess.Process] = set()
        self._is_over = False

    async def run(self, arguments: Sequence[str]) -> None:
        """Keep them running until cancelled, or until `stop`."""
        command = [sys.executable, "-m", "scheduler_service.frontend", *arguments]
        await asyncio.gather(*(self._keep(command) for _ in range(self._count)))

    async def _keep(self, command: Sequence[str]) -> None:
        pause, loop = FIRST_PAUSE_SECONDS, asyncio.get_running_loop()
        while not self._is_over:
            began = loop.time()
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:  # no memory, or too many processes
                log.error("front end could not be started", reason=error.strerror or str(error))
            else:
                self._processes.add(process)
                status = await process.wait()
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
        """Of those that run."""
        return {process.pid for process in self._processes}

    def kill(self, process_id: int) -> None:
        """End one of them at once; another number is passed over."""
        for process in self._processes:
            if process.pid == process_id:
                process.kill()

    async def stop(self, told: Set[int]) -> None:
        """Wait until those that were `told` to have ended, and kill the others: they have no calls yet, or hang."""
        self._is_over = True
        processes = list(self._processes)
        for process in processes:
            if process.pid not in told:
                process.kill()
        if processes:
            await asyncio.wait([asyncio.ensure_future(p.wait()) for p in processes], timeout=END_SECONDS)
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
