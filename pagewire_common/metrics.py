"""Metrics in Prometheus' text format at http://HOST:PORT/metrics.

The numbers are read on the event loop when a scrape asks for them, so that they are all of one moment and nothing has
to be locked. A thread of the HTTP server turns them into text.
"""

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pagewire_common.start_error import StartError

log = structlog.get_logger()

SCRAPE_SECONDS = 10.0

Families = Callable[[], Awaitable[Iterable[Metric]]]


@contextlib.asynccontextmanager
async def serve_metrics(listen: str | None, families: Families) -> AsyncIterator[str | None]:
    """Serve what `families` returns, within the block; gives HOST:PORT as bound, None when `listen` is None.

    Raises StartError when the address cannot be had.
    """
    if listen is None:
        yield None
        return
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_OnLoop(families, asyncio.get_running_loop()))
    ProcessCollector(registry=registry)
    host, _, port = listen.rpartition(":")
    server_class = _ServerIPv6 if ":" in host else _Server
    try:
        server = await asyncio.to_thread(
            make_server, host.strip("[]"), int(port), make_wsgi_app(registry), server_class, _Handler
        )
    except OSError as error:
        raise StartError(f"cannot serve metrics on {listen}: {error.strerror or error}") from error
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


class _OnLoop(Collector):
    """Reads the numbers on the event loop, whichever thread asks."""

    def __init__(self, families: Families, loop: asyncio.AbstractEventLoop) -> None:
        self._families = families
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        async def read() -> list[Metric]:
            return list(await self._families())

        reading = read()
        try:
            return asyncio.run_coroutine_threadsafe(reading, self._loop).result(SCRAPE_SECONDS)
        except (concurrent.futures.CancelledError, TimeoutError, RuntimeError):  # it is about to stop
            reading.close()
            return []


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _ServerIPv6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_SECONDS  # for a connection that sends nothing

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Scrapes are not logged."""
