"""A front end's HTTP server in the test's process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ports import free_address

from pagewire_common.connection.tls import OPEN, Security
from scheduler_service.frontend.http.cors import Origins
from scheduler_service.frontend.http.limits import Limits
from scheduler_service.frontend.http.server import HttpServer
from scheduler_service.frontend.link.engine_link import EngineLink


@asynccontextmanager
async def http_edge(
    link: EngineLink,
    limits: Limits | None = None,
    security: Security = OPEN,
    origins: Origins | None = None,
    *,
    has_page: bool = True,
) -> AsyncIterator[str]:
    """Its URL."""
    server, address = HttpServer(link, limits or Limits(), security, origins, has_page=has_page), free_address()
    await server.start(address)
    try:
        port = address.rpartition(":")[2]
        yield f"http://{address}" if security.tls is None else f"https://localhost:{port}"
    finally:
        await server.stop()
