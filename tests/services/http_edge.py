"""What `pagewire_client serve` serves HTTP with, in the test's process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from ports import free_address

from pagewire_client.http.edge import Edge
from pagewire_client.http.gateway import Gateway


@asynccontextmanager
async def http_edge(
    target: str, model: str, *, most_bytes: int = 1 << 20, most_sound_bytes: int = 0, has_gateway: bool = False
) -> AsyncIterator[str]:
    """Its URL. Without a gateway it serves the routes that need none."""
    edge, address = Edge(target, model, most_bytes=most_bytes, most_sound_bytes=most_sound_bytes), free_address()
    host, _, port = address.rpartition(":")
    await edge.start()
    with ExitStack() as stack:
        behind = "http://127.0.0.1:1"  # where nothing listens
        if has_gateway:
            gateway = stack.enter_context(Gateway(edge.target, free_address()))
            await asyncio.to_thread(gateway.wait_until_ready, 60)
            behind = gateway.url
        await edge.serve_http(host, int(port), behind)
        try:
            yield f"http://{address}"
        finally:
            await edge.close()
