"""The engine's process: starts and stops the engine, its ports, and its service for front ends, in order."""

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import AsyncIterator

import grpc
import structlog

from pagewire.v1 import admin_service_pb2
from pagewire.v1.admin_service_pb2_grpc import add_AdminServiceServicer_to_server
from pagewire.v1.engine_service_pb2_grpc import add_EngineServiceServicer_to_server
from pagewire_common.calls.errors import ErrorInterceptor
from pagewire_common.connection.tls import OPEN, Security
from pagewire_common.serving.server import GrpcServer, stop_event
from pagewire_common.start_error import StartError
from pagewire_common.telemetry.metrics import metrics_text, serve_metrics
from scheduler_service.access.audit import Audit
from scheduler_service.access.caller import admin_check
from scheduler_service.access.key_file import KeyFile
from scheduler_service.engine.engine import Engine
from scheduler_service.engine.front_ends.servicer import FrontEnds
from scheduler_service.operations.admin_servicer import AdminServicer
from scheduler_service.operations.metrics import SchedulerMetrics
from scheduler_service.processes.keeper import Place
from scheduler_service.recording.writer import next_file
from scheduler_service.settings import SchedulerSettings

log = structlog.get_logger()

ADMIN_SERVICE = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
ADMIN_BYTES = 64 << 10
"""Bytes of an operator's request."""
GOODBYE_SECONDS = 5.0
"""Seconds for front ends to detach at the end."""
OPTIONS = (("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20))


@contextlib.asynccontextmanager
async def engine_server(front_ends: FrontEnds, target: str) -> AsyncIterator[None]:
    """Serve front ends on a socket. Raises StartError if the socket's path is too long."""
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=OPTIONS)
    add_EngineServiceServicer_to_server(front_ends, server)
    try:
        server.add_insecure_port(target)
    except RuntimeError as error:  # the socket's path has more than 107 bytes
        raise StartError(f"cannot make the socket {target}: set TMPDIR to a shorter path") from error
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace=None)


@contextlib.asynccontextmanager
async def admin_server(admin: AdminServicer, listen: str, security: Security = OPEN) -> AsyncIterator[str]:
    """Yields the bound HOST:PORT. Raises StartError for an unusable port."""
    check = admin_check(lambda: admin.engine.keyring)
    server = GrpcServer(
        [ADMIN_SERVICE], max_receive_bytes=ADMIN_BYTES, security=security, check=check, outermost=[Audit()]
    )
    add_AdminServiceServicer_to_server(admin, server.server)
    address = await server.start(listen, "admin listening", "--admin-listen")
    await server.set_serving(True)
    try:
        yield address
    finally:
        await server.server.stop(grace=None)


async def serve(settings: SchedulerSettings, place: Place, pipe: int) -> None:
    """Serve until SIGTERM or SIGINT, then let streams finish during the grace period.

    Writes a byte to `pipe` when front ends can attach.
    """
    stop = stop_event()
    keys = KeyFile(settings.api_keys, settings.api_key.get_secret_value() if settings.api_key is not None else None)
    if place.is_used and settings.record is not None:
        settings = settings.model_copy(update={"record": next_file(settings.record)})
        log.info("recording goes on in another file", file=str(settings.record))
    engine = Engine(settings, keyring=keys.keyring)
    front_ends = FrontEnds(engine, settings.frontends, _kill)
    admin = AdminServicer(front_ends)
    metrics = SchedulerMetrics(
        front_ends, lambda: engine.fleet.agreement.model_name, vllm_names=settings.vllm_metric_names
    )
    front_ends.pages.commands = admin.commands
    front_ends.scrapes.read = lambda: metrics_text(metrics.families)
    security = settings.security()

    def may_read_metrics(authorization: str) -> bool:
        return engine.keyring is None or engine.keyring.opens_metrics(authorization)

    async with (
        serve_metrics(settings.metrics_listen, metrics.families, security, may_read_metrics),
        admin_server(admin, settings.admin_listen, security),
        engine_server(front_ends, place.engine),
    ):
        os.write(pipe, b"+")
        watching = asyncio.create_task(keys.watch(front_ends.set_keys))
        await _run(settings, engine, front_ends, admin, stop, place.http_listen)
        watching.cancel()
        await front_ends.say_goodbye(GOODBYE_SECONDS)
    log.info("stopped")


def _kill(process_id: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)


async def _run(
    settings: SchedulerSettings,
    engine: Engine,
    front_ends: FrontEnds,
    admin: AdminServicer,
    stop: asyncio.Event,
    http_listen: str | None,
) -> None:
    async def run_engine() -> None:
        others = {"http": http_listen, "tls": settings.tls and str(settings.tls)}
        given = {name: value for name, value in others.items() if value is not None}
        log.info("listening", address=await front_ends.wait_until_listening(), **given)
        await engine.run()

    running = asyncio.create_task(run_engine())
    announcing = asyncio.create_task(announce(engine, front_ends))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    log.info("stopping", requests=len(engine.requests.in_flight))
    announcing.cancel()
    front_ends.tell_serving(serving=False)
    await engine.drain(settings.grace)
    admin.close()
    tasks = (announcing, running, stopping)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def announce(engine: Engine, front_ends: FrontEnds) -> None:
    """Tell front ends' health services whether workers accept requests, until cancelled."""
    model = await engine.fleet.agreement.wait_for_model()
    _spare_the_collector()

    async def say_ready() -> None:
        await front_ends.until_serving()
        log.info("ready", model=model.name, context_length=model.context_length)

    async with asyncio.TaskGroup() as tasks:
        async for serving in engine.fleet.watch_health():  # watch_health first yields True
            front_ends.tell_serving(serving=serving)
            if serving:
                saying = tasks.create_task(say_ready())
            else:
                saying.cancel()
                log.warning("not serving: no worker takes requests", seconds=engine.settings.no_worker_timeout)


def _spare_the_collector() -> None:
    """Exclude the start's objects from Python's cycle collector, and make collections rare.

    Requests and sessions are freed at their end; only small cycles are left, for example in gRPC's exceptions.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 1)
