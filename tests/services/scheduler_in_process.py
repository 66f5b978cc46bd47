"""The scheduler's services in this process, on a free port, in front of fake workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from engines import OneProcess, running

from scheduler_service.frontend.engine_link import EngineLink
from scheduler_service.frontend.server import front_end_server, show_health
from scheduler_service.operations.admin_servicer import AdminServicer


@dataclass
class InProcess:
    engine: OneProcess
    admin: AdminServicer
    target: str

    @property
    def link(self) -> EngineLink:
        return self.engine.link


@asynccontextmanager
async def scheduler(*workers: str, listen: str = "127.0.0.1:0", **settings: object) -> AsyncIterator[InProcess]:
    async with running(*workers, **settings) as one:
        server = front_end_server(one.link, shares_port=False)
        target = await server.start(listen)
        showing = asyncio.create_task(show_health(one.link, server))
        try:
            yield InProcess(one, one.admin, target)
        finally:
            showing.cancel()
            with suppress(asyncio.CancelledError):
                await showing
            await server.server.stop(None)
