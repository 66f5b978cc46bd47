"""Metrics in Prometheus' text format at http://HOST:PORT/metrics.

A scrape reads all numbers on the event loop, so they are from the same moment and need no lock.
"""

import asyncio
import concurrent.futures
import contextlib
import http
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pagewire_common.connection.tls import OPEN, Security, TlsFolder
from pagewire_common.serving.listening import cannot_listen
from pagewire_common.start_error import StartError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

log = structlog.get_logger()

SCRAPE_SECONDS = 10.0
MAX_SECONDS = 30.0
"""Seconds that a connection may last."""
MAX_CONNECTIONS = 16
MAX_HEAD_BYTES = 16 << 10
_PEER_NAMES = "pagewire.peer_names"
"""The key of the client certificate's names in a request's WSGI environment."""

Families = Callable[[], Awaitable[Iterable[Metric]]]
MayRead = Callable[[str], bool]


@contextlib.asynccontextmanager
async def serve_metrics(
    listen: str | None,
    families: Families,
    security: Security = OPEN,
    may_read: MayRead | None = None,
    readers: Collection[str] = (),
) -> AsyncIterator[str | None]:
    """Serve the metrics that `families` returns, within the `with` block. Yields the bound HOST:PORT; None without
    `listen`.

    `may_read`: checks a request's Authorization header, on a thread. `readers`: names of which a client's certificate
    must contain one, unless empty. Raises StartError.
    """
    if listen is None:
        yield None
        return
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_OnLoop(families, asyncio.get_running_loop()))
    ProcessCollector(registry=registry)
    app = make_wsgi_app(registry)
    if may_read is not None:
        challenge = ("WWW-Authenticate", "Bearer")
        reason = "an API key that may read metrics is needed"
        app = _guarded(app, lambda environ: may_read(environ.get("HTTP_AUTHORIZATION", "")), 401, reason, challenge)
    if readers:
        reason = "your certificate does not have an identity that may read metrics"
        app = _guarded(app, lambda environ: not environ[_PEER_NAMES].isdisjoint(readers), 403, reason)
    host, _, port = listen.rpartition(":")
    server_class = _ServerIPv6 if ":" in host else _Server
    try:
        server = await asyncio.to_thread(make_server, host.strip("[]"), int(port), app, server_class, _Handler)
    except OSError as error:
        raise cannot_listen(listen, "--metrics-listen") from error
    if security.tls is not None:
        server.speak_tls(security.tls, mutual=security.mutual)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="metrics", daemon=True)
    thread.start()
    address = f"{host}:{server.server_port}"
    log.info("metrics", address=address)
    try:
        yield address
    finally:
        await asyncio.to_thread(server.shutdown)
        thread.join()
        server.server_close()


async def metrics_text(families: Families) -> bytes:
    """All metrics and those of this process, in Prometheus' text format, which is written on a thread."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Read(list(await families())))
    ProcessCollector(registry=registry)
    return await asyncio.to_thread(generate_latest, registry)


class _Read(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class _OnLoop(Collector):
    """A collector that any thread may call, and that reads the numbers on the event loop."""

    def __init__(self, families: Families, loop: asyncio.AbstractEventLoop) -> None:
        self._families = families
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        async def read() -> list[Metric]:
            return list(await self._families())

        reading = read()
        try:
            return asyncio.run_coroutine_threadsafe(reading, self._loop).result(SCRAPE_SECONDS)
        except (concurrent.futures.CancelledError, TimeoutError, RuntimeError):  # the service is stopping
            reading.close()
            return []


def _guarded(
    app: "WSGIApplication",
    may_pass: "Callable[[WSGIEnvironment], bool]",
    status: int,
    reason: str,
    *headers: tuple[str, str],
) -> "WSGIApplication":
    """Return an application that answers requests that `may_pass` refuses with this status and reason."""

    def guarded(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if may_pass(environ):
            return app(environ, start_response)
        phrase = http.HTTPStatus(status).phrase
        start_response(f"{status} {phrase}", [("Content-Type", "text/plain; charset=utf-8"), *headers])
        return [f"{reason}\n".encode()]

    return guarded


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    _tls: TlsFolder | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._room = threading.Semaphore(MAX_CONNECTIONS)

    def speak_tls(self, tls: TlsFolder, *, mutual: bool) -> None:
        self._loaded = tls.refresh()
        self._context = tls.server_context(mutual=mutual)
        self._tls, self._mutual = tls, mutual

    def _renew(self, tls: TlsFolder) -> None:
        if (generation := tls.refresh()) != self._loaded:
            # the TLS files are being replaced: the next connection reads them again
            with contextlib.suppress(OSError, StartError):
                self._context, self._loaded = tls.server_context(mutual=self._mutual), generation

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        if self._tls is not None:
            self._renew(self._tls)
            # The handshake follows on the connection's own thread, within the time limit of a request.
            connection = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def verify_request(self, request: object, client_address: object) -> bool:  # noqa: ARG002
        """Whether the number of connections allows another; if not, the new connection is closed."""
        return self._room.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Limit the total time of each connection, because a client may send single bytes slowly."""
        end = threading.Timer(MAX_SECONDS, _cut, (request,))
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._room.release()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Log at debug level, because the scraper's own log explains a failed scrape."""
        log.debug("scrape failed", exc_info=True)


class _ServerIPv6(_Server):
    address_family = socket.AF_INET6


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Head:
    """The first line and the headers of a request, within limits of bytes and seconds."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._left = MAX_HEAD_BYTES

    def readline(self, limit: int = -1) -> bytes:
        line: bytes = self._stream.readline(self._left if limit < 0 else min(limit, self._left))
        self._left -= len(line)
        if not self._left:
            raise ConnectionAbortedError("a head that is too long")
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_SECONDS  # seconds after which a connection that sends nothing is closed

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = _Head(self.rfile)

    def get_environ(self) -> "WSGIEnvironment":
        environ = super().get_environ()
        certificate = self.connection.getpeercert() if isinstance(self.connection, ssl.SSLSocket) else None
        names: Any = (certificate or {}).get("subjectAltName", ())
        environ[_PEER_NAMES] = {str(name) for _, name in names}
        return environ

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Write no log lines for scrapes."""
