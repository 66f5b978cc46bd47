"""A front-end process: a gRPC server on a port that all front ends share, and the link to the engine."""

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import grpc
import structlog

from pagewire.v1 import engine_service_pb2 as pb
from pagewire.v1 import inference_service_pb2
from pagewire.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from pagewire_common.calls.errors import RequestError
from pagewire_common.connection.tls import OPEN, Security
from pagewire_common.serving.server import MAX_CONNECTIONS, GrpcServer
from pagewire_common.telemetry.tracing import tracing
from scheduler_service.access.audit import Audit
from scheduler_service.frontend.http.cors import Origins
from scheduler_service.frontend.http.limits import Limits
from scheduler_service.frontend.http.server import HttpServer
from scheduler_service.frontend.link.engine_link import EngineLink
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.servicer import InferenceServicer

log = structlog.get_logger()

SERVICES = [inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name]
LOOK_SECONDS = 1.0
END_SECONDS = 1.0
"""Seconds for clients to read the error of a drain."""
UNLOADED_SECONDS = 5.0
"""Seconds before a front end that cannot load the model restarts. Until then, its calls fail with the reason."""
MAX_SILENT_SECONDS = 30.0
"""Seconds of silence after which the engine counts as hanging. A working engine sends a message every five seconds."""
DRAINED = RequestError(
    grpc.StatusCode.UNAVAILABLE, "this front end ends for another one; resume the request, which goes on there"
)
LONGEST_MESSAGE = 20 << 20
"""Largest bytes of a client's gRPC message: more than a million tokens of prompt, or a sound, prompt_embeds
or images of 16 MiB."""


def front_end_server(
    link: EngineLink, *, shares_port: bool, security: Security = OPEN, max_connections: int = MAX_CONNECTIONS
) -> GrpcServer:
    server = GrpcServer(
        SERVICES,
        max_receive_bytes=LONGEST_MESSAGE,
        request_limits=link.request_limits,
        shares_port=shares_port,
        security=security,
        check=link.check,
        max_connections=max_connections,
        outermost=[Audit(link.refusals)],
    )
    add_InferenceServiceServicer_to_server(InferenceServicer(link), server.server)
    return server


class Ports(NamedTuple):
    """The ports of a front end. `http`: HOST:PORT of HTTP, or None without HTTP. `grace`: seconds that streams have to
    end when the front end drains. `origins`: the origins of web pages that may call. `page`:
    whether the page at / is served. `media_hosts`: hosts from which images are fetched.
    """

    listen: str
    http: str | None = None
    security: Security = OPEN
    max_connections: int = MAX_CONNECTIONS
    receive_timeout: float = 60.0
    grace: float = 0.0
    origins: frozenset[str] = frozenset()
    page: bool = True
    media_hosts: tuple[str, ...] = ()


async def serve(
    engine: str,
    ports: Ports,
    traces_endpoint: str | None = None,
    response_template: Mapping[str, Any] | None = None,
) -> int:
    """Serve clients until an engine says goodbye, none comes, or SIGUSR1 asks for a drain. Returns the exit status of
    the process.
    """
    async with tracing(traces_endpoint, "pagewire-scheduler") as tracer:
        return await _serve(EngineLink(engine, tracer, response_template), ports)


async def _serve(link: EngineLink, ports: Ports) -> int:
    running = asyncio.create_task(link.run())
    showing = watching = None
    draining = asyncio.create_task(_signal(signal.SIGUSR1))
    try:
        await asyncio.wait((running, link.welcome), return_when=asyncio.FIRST_COMPLETED)
        if link.welcome.done():
            security, most = ports.security, ports.max_connections
            server = front_end_server(link, shares_port=True, security=security, max_connections=most)
            limits, origins = Limits(most, ports.receive_timeout), Origins(ports.origins)
            http = HttpServer(link, limits, security, origins, has_page=ports.page, media_hosts=ports.media_hosts)
            if ports.http is not None:
                await http.start(ports.http)
            address = await server.start(ports.listen, "front end listening")
            link.listens(address)
            signal.alarm(0)
            showing = asyncio.create_task(show_health(link, server))
            watching = asyncio.create_task(watch_engine(link, server, http))
            await asyncio.wait((running, showing, draining), return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                await drain(link, server, http, ports.grace)
                return 0
            if showing.done():
                log.error("the model's tokenizer cannot be loaded", exc_info=showing.exception())
                await asyncio.wait((running,), timeout=UNLOADED_SECONDS)
            await http.stop()
            await server.stop(_nothing, 0)
            if showing.done():
                return 1
        return 0 if await running else 1
    finally:
        for task in (running, showing, watching, draining):
            if task is not None:
                task.cancel()
        await link.connection.close()


async def _signal(number: int) -> None:
    came = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(number, came.set)
    await came.wait()


def _say_ready() -> None:
    """Tell the keeper, by the pipe that is this process's stdin, that this front end can replace another."""
    with contextlib.suppress(OSError):  # started by hand, the process has another stdin
        os.write(0, b"+")


async def drain(link: EngineLink, server: GrpcServer, http: HttpServer, grace: float) -> None:
    """Take no further connections, and end the streams that are open after `grace` seconds with DRAINED: without an
    engine at once.
    """
    if link.connection.is_held:
        grace = 0.0
    log.info("front end drains", requests=len(link.requests.by_call), seconds=grace)
    ending = asyncio.get_running_loop().call_later(grace, link.requests.fail_all, DRAINED)
    await asyncio.gather(server.close(grace + END_SECONDS), http.close(grace + END_SECONDS))
    ending.cancel()


async def show_health(link: EngineLink, server: GrpcServer) -> None:
    _log_chats(await link.loading.wait())
    _spare_the_collector()
    while True:
        link.serving_changed.clear()
        serving = link.serving
        await server.set_serving(serving)
        link.connection.say(0, health_shown=pb.HealthShown(serving=serving))
        if serving:
            _say_ready()
        await link.serving_changed.wait()


def _log_chats(model: ServedModel) -> None:
    """Log how the model writes reasoning and tool calls."""
    if model.tokenizer is None or not model.tokenizer.has_chat_template:
        return
    log.info("chats", **model.chats)


async def watch_engine(link: EngineLink, server: GrpcServer, http: HttpServer) -> None:
    """Report NOT_SERVING while the engine is silent, also to liveness probes: no call can end without the engine."""
    is_alive = True
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if (time.monotonic() - link.connection.heard_at < MAX_SILENT_SECONDS) is not is_alive:
            is_alive = not is_alive
            if is_alive:
                log.info("the engine answers again")
            else:
                log.error("the engine hangs", seconds=MAX_SILENT_SECONDS)
            http.set_alive(is_alive)
            await server.set_alive(is_alive)
            await server.set_serving(is_alive and link.serving)


async def _nothing(_: float) -> None:
    """An empty drain for `GrpcServer.stop`: every stream has already ended or cannot continue."""


def _spare_the_collector() -> None:
    """Exclude the objects that exist after the model is loaded from Python's cycle collector.

    The tokenizers library alone creates half a million lasting objects: scanning them took a third of the process's
    time under load, in pauses of 0.1 s. The collector is needed only for small cycles, such as in gRPC's exceptions, so
    it scans the oldest generation once in about 100,000 new objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 1)
