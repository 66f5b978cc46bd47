"""The HTTP port: a limit on connections, the current certificates, and answers to requests that are no valid HTTP.

A connection counts from its accept until its socket is closed. Connections of silent clients and unfinished TLS
handshakes therefore count towards the limit. A new connection is closed if the number of connections is at the limit.
"""

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMethod, BadStatusLine, LineTooLong
from aiohttp.web_protocol import RequestHandler

from pagewire_common.connection.tls import Security
from pagewire_common.start_error import StartError
from scheduler_service.frontend.http.errors import HttpError, invalid

LOOK_SECONDS = 1.0
_REASONS = {
    LineTooLong: "the request's head has a line that is too long",
    BadHttpMethod: "the request's first line has no valid method",
    BadStatusLine: "the request's first line is not of HTTP/1.1",
}
"""Reasons by aiohttp's errors, special errors before their base classes."""


@dataclass(slots=True)
class _Room:
    """The number of connections that may still be accepted. All sockets that listen at the port share this number."""

    num_free: int


class _Accepted(socket.socket):
    """The socket of a connection. When the socket is closed, another connection may be accepted in its place."""

    room: _Room | None = None

    def close(self) -> None:
        if self.room is not None:
            self.room.num_free += 1
            self.room = None
        super().close()


class _Listening(socket.socket):
    room: _Room

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises ConnectionAbortedError at the limit. asyncio then continues with the next
        connection.
        """
        connection, address = super().accept()
        if not self.room.num_free:
            connection.close()
            raise ConnectionAbortedError("too many connections")
        accepted = _Accepted(connection.family, connection.type, connection.proto, connection.detach())
        accepted.room = self.room
        self.room.num_free -= 1
        return accepted, address


class Port:
    """Accepts connections to an address until `close`. aiohttp's runner owns the accepted connections.

    After the TLS files change, new connections use the new files. Open connections continue.
    """

    def __init__(self, runner: web.AppRunner, security: Security, max_connections: int) -> None:
        self._runner, self._security = runner, security
        self._room = _Room(max_connections)
        self._socket: socket.socket | None = None
        self._site: web.SockSite | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def open(self, host: str, port: int) -> None:
        """Begin to listen. Raises OSError if the address is in use, and StartError for unusable certificates."""
        self._socket = _Listening(socket.AF_INET6 if ":" in host else socket.AF_INET)
        if self._socket.family is socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # shared with the other front ends
        self._socket.bind((host, port))
        loaded = self._security.tls.refresh() if self._security.tls is not None else 0
        await self._accept()
        if self._security.tls is not None:
            self._renewing = asyncio.create_task(self._renew(loaded))

    async def _accept(self) -> None:
        """Listen with a new TLS context. A listener cannot change its TLS context, so a new listener replaces the old
        listener.
        """
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
        """Watch the TLS files until cancelled."""
        assert self._security.tls is not None
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if (generation := self._security.tls.refresh()) != loaded:
                # the TLS files are being replaced: they are checked again in a second
                with contextlib.suppress(OSError, StartError):
                    await self._accept()
                    loaded = generation

    async def close(self) -> None:
        """Stop listening. aiohttp's runner closes the open connections."""
        if self._renewing is not None:
            self._renewing.cancel()
        if self._site is not None:
            await self._site.stop()
        if self._socket is not None:
            self._socket.close()


class Runner(web.AppRunner):
    """Runs an application whose connections answer malformed requests in the format of the other errors. aiohttp's own
    answer would quote the request.
    """

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        factory, cancels = made.request_factory, made.handler_cancellation
        return _Server(made.request_handler, request_factory=factory, handler_cancellation=cancels, **made._kwargs)


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # raises if an answer has begun
        error = HttpError(500, "internal_error", "internal error")
        if status == 400:
            reasons = (reason for kind, reason in _REASONS.items() if isinstance(exc, kind))
            error = invalid(next(reasons, "the request is no valid HTTP/1.1"))
        answer = error.response()
        answer.headers["Server"] = "pagewire"
        answer.force_close()
        return answer
