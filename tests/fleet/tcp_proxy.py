"""A TCP proxy that can become a black hole: its connections stay open, but nothing passes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TcpProxy:
    """Forwards connections to `target`, a HOST:PORT, until `swallow`."""

    def __init__(self, target: str) -> None:
        self.address = ""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._pumps: set[asyncio.Task[None]] = set()

    def swallow(self) -> None:
        """Let no byte pass in either direction, without telling the ends."""
        self._is_open.clear()

    def heal(self) -> None:
        """Pass on what was held back, and everything later."""
        self._is_open.set()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._is_open.wait()
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:  # as at a port without a listener
            writer.transport.abort()
            return
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                await self._is_open.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.transport.abort()

    async def close(self) -> None:
        for pump in (pumps := list(self._pumps)):
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


@asynccontextmanager
async def tcp_proxy(target: str) -> AsyncIterator[TcpProxy]:
    """A proxy on a free port, for the block."""
    proxy = TcpProxy(target)
    server = await asyncio.start_server(proxy.connect, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    proxy.address = f"{host}:{port}"
    async with server:
        yield proxy
        server.close()
        await proxy.close()
