"""Random disturbances of a fleet, one after the other.

None may show in an answer: clients resume broken streams, and the loss of a worker is a pause.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from random import Random

import grpc
import psutil
from cluster import front_ends
from processes import Member
from tcp_proxy import TcpProxy

from bench.systems.processes import engine_process
from pagewire_client.admin import Admin

SHORT, LONG = (1.0, 4.0), (10.0, 60.0)
"""Seconds that a process is stopped or a connection half-open. Workers are lost after two, clients' connections after
40.
"""


class Disturbances:
    """The processes of a fleet, and the connections to them that can swallow everything."""

    def __init__(
        self,
        draw: Random,
        scheduler: Member,
        workers: Sequence[Member],
        clients: TcpProxy,
        links: Sequence[TcpProxy],
        seconds: Sequence[float] = SHORT,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.is_over = False
        self._draw = draw
        self._scheduler = scheduler
        self._workers = workers
        self._clients = clients
        self._links = links
        self._seconds = seconds
        self._kinds: dict[Callable[[], Awaitable[None]], int] = {
            self.worker_killed: 3,
            self.worker_stopped: 2,
            self.worker_half_open: 2,
            self.worker_drained: 1,
            self.front_end_killed: 2,
            self.engine_killed: 1,
            self.scheduler_killed: 1,
            self.clients_half_open: 1,
            self.clients_cut_off: 2,
            self.prefix_cache_reset: 3,
        }

    async def run(self) -> None:
        """Until `is_over`, and to the end of the last one."""
        while not self.is_over:
            await self.one()
            await asyncio.sleep(self._draw.uniform(0.05, 0.8))

    async def one(self) -> None:
        (kind,) = self._draw.choices(list(self._kinds), weights=list(self._kinds.values()))
        self.counts[kind.__name__] += 1
        await kind()

    async def worker_killed(self) -> None:
        await restart(self._draw.choice(self._workers))

    async def worker_stopped(self) -> None:
        """SIGSTOP until the worker may be lost; later messages do not count."""
        worker = self._draw.choice(self._workers)
        worker.signal(signal.SIGSTOP)
        try:
            await self._wait()
        finally:
            worker.signal(signal.SIGCONT)

    async def worker_half_open(self) -> None:
        await self._swallow(self._draw.choice(self._links))

    async def clients_half_open(self) -> None:
        await self._swallow(self._clients)

    async def clients_cut_off(self) -> None:
        await self._clients.close()

    async def worker_drained(self) -> None:
        link = self._draw.choice(self._links)
        async with Admin(self._scheduler.admin_address) as admin:
            with suppress(grpc.aio.AioRpcError):
                await admin.drain(link.address)
            try:
                await self._wait()
            finally:
                await admin.undrain(link.address)

    async def prefix_cache_reset(self) -> None:
        async with Admin(self._scheduler.admin_address) as admin:
            await admin.reset_prefix_cache()

    async def front_end_killed(self) -> None:
        with suppress(psutil.NoSuchProcess):
            if living := front_ends(self._scheduler.address):  # all may be starting again
                self._draw.choice(living).kill()

    async def engine_killed(self) -> None:
        """The front ends live on."""
        engine_process(self._scheduler.pid).kill()
        await asyncio.to_thread(self._scheduler.wait_for, "ready")

    async def scheduler_killed(self) -> None:
        await restart(self._scheduler)

    async def _swallow(self, proxy: TcpProxy) -> None:
        proxy.swallow()
        try:
            await self._wait()
        finally:
            proxy.heal()

    async def _wait(self) -> None:
        await asyncio.sleep(self._draw.uniform(*self._seconds))


async def restart(member: Member) -> None:
    """SIGKILL, and a start at the same address."""

    def do() -> None:
        member.kill()
        member.start()
        member.wait_for("ready")

    await asyncio.to_thread(do)
