"""The port that HTTP is served at: so many connections and no more, with the certificates as they are now.

A connection counts from when the system has it until its socket is closed, so that one counts whose client is silent,
or never ends its TLS handshake. What comes beyond the limit is closed.
"""

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from pagewire_common.connection.tls import Security
from pagewire_common.start_error import StartError

LOOK_SECONDS = 1.0


@dataclass(slots=True)
class _Room:
    """For connections, of all sockets that listen at the port."""

    num_free: int


class _Accepted(socket.socket):
    """Gives its place back when it is closed."""

    room: _Room | None = None

    def close(self) -> None:
        if self.room is not None:
            self.room.num_free += 1
            self.room = None
        super().close()


class _Listening(socket.socket):
    room: _Room

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises ConnectionAbortedError where there is no room; asyncio then goes on with the next connection."""
        connection, address = super().accept()
        if not self.room.num_free:
            connection.close()
            raise ConnectionAbortedError("too many connections")
        accepted = _Accepted(connection.family, connection.type, connection.proto, connection.detach())
        accepted.room = self.room
        self.room.num_free -= 1
        return accepted, address


class Port:
    """Connections to an address are the runner's, until `close`. With TLS, those that come after the files have changed
    are held to the new ones, and the others go on."""

    def __init__(self, runner: web.AppRunner, security: Security, max_connections: int) -> None:
        self._runner, self._security = runner, security
        self._room = _Room(max_connections)
        self._socket: socket.socket | None = None
        self._site: web.SockSite | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def open(self, host: str, port: int) -> None:
        """Raises OSError when the address cannot be had, and StartError when the certificates cannot be used."""
        self._socket = _Listening(socket.AF_INET6 if ":" in host else socket.AF_INET)
        if self._socket.family is socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, port))
        loaded = self._security.tls.refresh() if self._security.tls is not None else 0
        await self._accept()
        if self._security.tls is not None:
            self._renewing = asyncio.create_task(self._renew(loaded))

    async def _accept(self) -> None:
        """What accepts uses one context from its beginning to its end: another takes the same port over from it."""
        tls, mutual, _ = self._security
        context = None if tls is None else tls.server_context(mutual=mutual)
        assert self._socket is not None
        listening = self._socket.dup()
        assert isinstance(listening, _Listening)
        listening.room = self._room
        before, self._site = self._site, web.SockSite(self._runner, listening, ssl_context=context)
        await self._site.start()
        if before is not None:
            await before.stop()

    async def _renew(self, loaded: int) -> None:
        """Until cancelled."""
        assert self._security.tls is not None
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if (generation := self._security.tls.refresh()) != loaded:
                with contextlib.suppress(OSError, StartError):  # they change at this moment: a second later then
                    await self._accept()
                    loaded = generation

    def close(self) -> None:
        """Connections are the runner's to close."""
        if self._renewing is not None:
            self._renewing.cancel()
        if self._socket is not None:
            self._socket.close()
