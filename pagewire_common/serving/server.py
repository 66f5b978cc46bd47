"""The life of a gRPC server: bind, report health, serve until SIGTERM or SIGINT, drain, and exit with status 0."""

import asyncio
import faulthandler
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc

from pagewire_common.calls.errors import Check, ErrorInterceptor, Lock
from pagewire_common.calls.request_limits import RequestLimits
from pagewire_common.connection.tls import OPEN, Security
from pagewire_common.serving.health import Health
from pagewire_common.serving.listening import cannot_listen
from pagewire_common.serving.open_files import raise_open_files_limit
from pagewire_common.serving.reflection import add_reflection
from pagewire_common.start_error import StartError

log = structlog.get_logger()

# Clients may ping every 10 s, even between calls. The server pings every client each minute, and closes the connection
# after another minute without an answer: a frozen client's unread answers take memory, 1.5 MB for a text of 131,000
# tokens. By default, gRPC would cancel calls that wait for the event loop for 30 s, and some if more than a thousand
# wait. Scheduler and worker limit waiting calls themselves.
OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.server_max_unrequested_time_in_server", 86_400),
    ("grpc.server.max_pending_requests", 1 << 16),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 16),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.max_concurrent_streams", 4096),
)

MAX_CONNECTIONS = 1024
"""Connections of a server without a setting for this limit."""

LIVENESS = "liveness"
"""The health service's name for liveness probes: SERVING while the event loop runs, even if the service is not ready.
"""


class GrpcServer:
    """A gRPC server with health, reflection and readable errors. Create it inside the running event loop.

    Until `set_serving`, every service and the server as a whole ("") are NOT_SERVING; `LIVENESS` is SERVING. gRPC
    refuses messages above `max_receive_bytes`; above `request_limits`, the error explains. Servers on one port must all
    set `shares_port`. `security` and `check` decide which callers are accepted; `outermost` interceptors also see
    refused calls.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        *,
        max_receive_bytes: int,
        request_limits: Callable[[], RequestLimits] | None = None,
        shares_port: bool = False,
        security: Security = OPEN,
        check: Check | None = None,
        max_connections: int = MAX_CONNECTIONS,
        outermost: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        options = (
            *OPTIONS,
            ("grpc.max_receive_message_length", max_receive_bytes),
            ("grpc.so_reuseport", int(shares_port)),
            ("grpc.max_allowed_incoming_connections", max_connections),
        )
        errors = ErrorInterceptor(request_limits)
        self._security = security
        interceptors = [*outermost, Lock(check, security.identity), errors]
        self.server = grpc.aio.server(interceptors=interceptors, options=options)
        self._names = ("", *service_names)
        self._is_stopping = False
        self._health = Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        add_reflection((*service_names, health.SERVICE_NAME), self.server)

    async def start(self, listen: str, event: str = "listening", setting: str = "--listen") -> str:
        """Bind, serve, and log the address as an `event`. Returns HOST:PORT. Raises StartError, with `setting`."""
        await self.set_serving(False)
        await self.set_alive(True)
        try:
            if self._security.tls is None:
                port = self.server.add_insecure_port(listen)
            else:
                credentials = self._security.tls.server_credentials(mutual=self._security.mutual)
                port = self.server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise cannot_listen(listen, setting) from error
        await self.server.start()
        address = f"{listen.rpartition(':')[0]}:{port}"
        log.info(event, address=address)
        return address

    async def set_alive(self, alive: bool) -> None:
        """Set the status for liveness probes, at first SERVING."""
        self._health.set(LIVENESS, serving=alive)

    async def set_serving(self, serving: bool) -> None:
        """Report SERVING or NOT_SERVING for every gRPC service, until the server begins to stop."""
        if self._is_stopping:
            return
        for name in self._names:
            self._health.set(name, serving=serving)

    async def close(self, seconds: float) -> None:
        """Report NOT_SERVING for good, accept no further calls, and cancel those that are open after `seconds`."""
        await self.set_serving(False)
        self._is_stopping = True
        await self.server.stop(grace=seconds)

    async def stop(self, drain: Callable[[float], Awaitable[None]], grace: float) -> None:
        """Report NOT_SERVING for good, let `drain` end the work within `grace` seconds, then close all calls."""
        await self.set_serving(False)
        self._is_stopping = True
        await drain(grace)
        await self.server.stop(grace=1.0)


def stop_event() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def run(program: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a service until it ends. A StartError is printed as one sentence on stderr, with exit status 1."""
    raise_open_files_limit()
    faulthandler.enable(sys.stderr)  # prints the stack of a crash in a C library, without values
    try:
        asyncio.run(main())
    except StartError as error:
        sys.exit(f"{program}: {error}")
