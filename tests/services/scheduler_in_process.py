"""The scheduler's services in this process, on a free port, in front of fake workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from engines import OneProcess, running

from pagewire_common.connection.tls import OPEN, Security
from scheduler_service.frontend.link.engine_link import EngineLink
from scheduler_service.frontend.server import front_end_server, show_health
from scheduler_service.operations.admin_servicer import AdminServicer
from scheduler_service.server import admin_server


@dataclass
class InProcess:
    engine: OneProcess
    admin: AdminServicer
    target: str
    admin_target: str

    @property
    def link(self) -> EngineLink:
        return self.engine.link


@asynccontextmanager
async def scheduler(
    *workers: str, admin_listen: str = "127.0.0.1:0", security: Security = OPEN, **settings: object
) -> AsyncIterator[InProcess]:
    async with running(*workers, **settings) as one:
        server = front_end_server(one.link, shares_port=False, security=security)
        target = await server.start("127.0.0.1:0")
        showing = asyncio.create_task(show_health(one.link, server))
        try:
            async with admin_server(one.admin, admin_listen, security) as admin_target:
                yield InProcess(one, one.admin, target, admin_target)
        finally:
            showing.cancel()
            with suppress(asyncio.CancelledError):
                await showing
            await server.server.stop(None)
