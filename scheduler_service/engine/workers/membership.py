"""The workers: they join when their address is found, and leave when it is gone and their session is over."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from pagewire_common.calls.errors import RequestError
from scheduler_service.engine.workers.discovery import Resolve, watch_name
from scheduler_service.engine.workers.worker_loop import Fleet, WorkerLoop
from scheduler_service.targets import is_name


@dataclass(slots=True)
class Departed:
    """Sums over the workers that have left. Without them, counts over all workers would fall when a worker leaves."""

    num_losses: int = 0
    num_preemptions: int = 0
    num_steps: int = 0


class Membership:
    """One `WorkerLoop` for each address, also if several targets lead to it."""

    def __init__(self, fleet: Fleet, resolve: Resolve) -> None:
        self._fleet = fleet
        self._resolve = resolve
        self._targets = fleet.settings.workers
        self._found: dict[str, frozenset[str]] = {
            target: frozenset() if is_name(target) else frozenset((target,)) for target in self._targets
        }
        self._loops: dict[str, WorkerLoop] = {}
        self.departed = Departed()
        self._start: Callable[[WorkerLoop], object] = lambda loop: None  # noqa: ARG005
        self._update()

    @property
    def workers(self) -> list[WorkerLoop]:
        return list(self._loops.values())

    @property
    def admits(self) -> bool:
        """Whether any worker takes requests."""
        return any(loop.admits for loop in self._loops.values())

    def find(self, address: str) -> WorkerLoop:
        """Raises NOT_FOUND for an unknown address."""
        if (loop := self._loops.get(address)) is None:
            known = ", ".join(sorted(self._loops)) or "none"
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"there is no worker {address!r}; known: {known}")
        return loop

    def wake(self) -> None:
        """Have every worker look whether there is something to send."""
        for loop in self._loops.values():
            loop.wake()

    async def run(self) -> None:
        """Look after the workers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._start = lambda loop: tasks.create_task(self._run(loop))
            for loop in self.workers:
                self._start(loop)
            for target in self._found:
                if is_name(target):
                    tasks.create_task(self._follow(target))
            await asyncio.Event().wait()

    async def _follow(self, target: str) -> None:
        async for addresses in watch_name(target, self._resolve, self._fleet.settings.discovery_interval):
            self._found[target] = addresses
            self._update()

    def _update(self) -> None:
        wanted = dict.fromkeys(address for addresses in self._found.values() for address in sorted(addresses))
        for address in wanted:
            if (loop := self._loops.get(address)) is None:
                self._loops[address] = loop = WorkerLoop(self._fleet, address)
                self._start(loop)
            loop.is_wanted = True
        for address in self._loops.keys() - wanted:
            if self._loops[address].leave():
                del self._loops[address]

    async def _run(self, loop: WorkerLoop) -> None:
        try:
            await loop.run()
        finally:
            self.departed.num_losses += loop.num_losses
            self.departed.num_preemptions += loop.num_preemptions
            self.departed.num_steps += loop.num_steps
            if self._loops.get(loop.client.address) is loop:
                del self._loops[loop.client.address]
            await loop.client.close()
