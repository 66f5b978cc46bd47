"""The HTTP server of `pagewire_client serve`, in the test's process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from ports import free_address

from pagewire_client.http.edge import DEFAULTS, Edge
from pagewire_client.http.gateway import Gateway
from pagewire_client.http.limits import Limits
from pagewire_common.connection.tls import OPEN, Security


@asynccontextmanager
async def http_edge(
    target: str,
    model: str,
    limits: Limits = DEFAULTS,
    *,
    has_gateway: bool = False,
    security: Security = OPEN,
    **access: Any,
) -> AsyncIterator[str]:
    """Yields its URL. Without a gateway it serves only routes that need none. `access` is for the scheduler."""
    edge, address = Edge(target, model, limits, **access), free_address()
    host, _, port = address.rpartition(":")
    await edge.start()
    with ExitStack() as stack:
        behind = "http://127.0.0.1:1"  # where nothing listens
        if has_gateway:
            gateway = stack.enter_context(Gateway(edge.target, free_address()))
            await asyncio.to_thread(gateway.wait_until_ready, 60)
            behind = gateway.url
        await edge.serve_http(host, int(port), behind, security)
        try:
            yield f"http://{address}" if security.tls is None else f"https://localhost:{port}"
        finally:
            await edge.close()
