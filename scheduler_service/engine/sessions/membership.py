"""The set of workers: a worker leaves when its address has disappeared and its session has ended."""

import asyncio
from collections.abc import Callable

from scheduler_service.engine.sessions.discovery import Resolve, watch_name
from scheduler_service.engine.sessions.worker_fleet import WorkerFleet
from scheduler_service.engine.sessions.worker_loop import WorkerLoop
from scheduler_service.targets import is_name


class Membership:
    """One `WorkerLoop` for each address, even of several targets."""

    def __init__(self, fleet: WorkerFleet, resolve: Resolve) -> None:
        self._fleet = fleet
        self._resolve = resolve
        self._found: dict[str, frozenset[str]] = {
            target: frozenset() if is_name(target) else frozenset((target,)) for target in fleet.settings.workers
        }
        self._loops: dict[str, WorkerLoop] = {}
        self._start: Callable[[WorkerLoop], object] = lambda loop: None  # noqa: ARG005
        self._update()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._start = lambda loop: tasks.create_task(self._run(loop))
            for loop in list(self._loops.values()):
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
                worker = self._fleet.connect(address)
                self._fleet.workers.add(worker)
                self._loops[address] = loop = WorkerLoop(self._fleet, worker)
                self._start(loop)
            loop.worker.is_wanted = True
        for address in self._loops.keys() - wanted:
            if self._loops[address].leave():
                self._remove(self._loops[address])

    def _remove(self, loop: WorkerLoop) -> None:
        address = loop.worker.client.address
        if self._loops.get(address) is loop:
            del self._loops[address]
            self._fleet.workers.remove(loop.worker)

    async def _run(self, loop: WorkerLoop) -> None:
        try:
            await loop.run()
        finally:
            self._fleet.workers.departed.add(loop.worker)
            self._remove(loop)
            await loop.worker.client.close()
