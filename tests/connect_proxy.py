"""A small HTTP proxy that only knows CONNECT, and the environment that names it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from pagewire_common.connection.channel import EXCEPTION_VARIABLES, PROXY_VARIABLES

PASSWORD = "me:secret"


class ConnectProxy:
    """Connects, or refuses with 503 unless it `connects`. `asked` are the HOST:PORTs."""

    def __init__(self, *, connects: bool) -> None:
        self.asked: list[str] = []
        self.address = ""
        self._connects = connects
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._tasks.add(asyncio.create_task(self._answer(reader, writer)))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
        self.asked.append(target)
        if not self._connects:
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
            writer.close()
            return
        far_reader, far_writer = await asyncio.open_connection(*target.rsplit(":", 1))
        self._writers.append(far_writer)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


@asynccontextmanager
async def connect_proxy(*, connects: bool) -> AsyncIterator[ConnectProxy]:
    proxy = ConnectProxy(connects=connects)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.address = "{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()


def set_proxy(patch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in (*PROXY_VARIABLES, *EXCEPTION_VARIABLES):
        patch.delenv(name, raising=False)
    for name, value in variables.items():
        patch.setenv(name, value)
