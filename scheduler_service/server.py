"""The engine's process: engine, front ends and metrics, and the order in which they start and stop."""

import asyncio
import contextlib
import gc
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import structlog

from pagewire.v1.admin_service_pb2_grpc import add_AdminServiceServicer_to_server
from pagewire.v1.engine_service_pb2_grpc import add_EngineServiceServicer_to_server
from pagewire_common.errors import ErrorInterceptor
from pagewire_common.metrics import serve_metrics
from pagewire_common.server import stop_event
from scheduler_service.engine.engine import Engine
from scheduler_service.engine.engine_servicer import FrontEnds
from scheduler_service.engine.front_end_processes import FrontEndProcesses, reserve_port
from scheduler_service.engine.limits import model_name
from scheduler_service.operations.admin_servicer import AdminServicer
from scheduler_service.operations.metrics import SchedulerMetrics
from scheduler_service.settings import SchedulerSettings

log = structlog.get_logger()

OPTIONS = (("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20))


@contextlib.asynccontextmanager
async def engine_server(front_ends: FrontEnds, admin: AdminServicer) -> AsyncIterator[str]:
    """Serve front ends on a socket that only this user can open; gives its target."""
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=OPTIONS)
    add_EngineServiceServicer_to_server(front_ends, server)
    add_AdminServiceServicer_to_server(admin, server)
    with tempfile.TemporaryDirectory(prefix="pagewire-") as directory:  # only its owner may enter it
        target = f"unix:{Path(directory) / 'engine'}"
        server.add_insecure_port(target)
        await server.start()
        try:
            yield target
        finally:
            await server.stop(grace=None)


async def serve(settings: SchedulerSettings) -> None:
    """Serve until SIGTERM or SIGINT: admit nothing more, let streams finish for the grace period, return."""
    stop = stop_event()
    engine = Engine(settings)
    processes = FrontEndProcesses(settings.frontends)
    front_ends, admin = FrontEnds(engine, settings.frontends, processes.kill), AdminServicer(engine)
    metrics = SchedulerMetrics(front_ends, model_name(settings.model), vllm_names=settings.vllm_metric_names)
    with contextlib.closing(reserve_port(settings.listen)) as port:
        listen = f"{settings.listen.rpartition(':')[0]}:{port.getsockname()[1]}"
        async with (
            serve_metrics(settings.metrics_listen, metrics.families),
            engine_server(front_ends, admin) as target,
        ):
            arguments = ["--engine", target, "--listen", listen]
            arguments += ["--log-level", settings.log_level, "--log-format", settings.log_format]
            keeping = asyncio.create_task(processes.run(arguments))
            await _run(settings, engine, front_ends, admin, stop, keeping)
            await processes.stop()
            keeping.cancel()
    log.info("stopped")


async def _run(
    settings: SchedulerSettings,
    engine: Engine,
    front_ends: FrontEnds,
    admin: AdminServicer,
    stop: asyncio.Event,
    keeping: asyncio.Task[None],
) -> None:
    async def run_engine() -> None:
        log.info("listening", address=await front_ends.wait_until_listening())
        await engine.run()

    async def announce() -> None:
        model = await engine.wait_for_model()
        _spare_the_collector()
        async for serving in engine.watch_health():
            await front_ends.set_serving(serving)
            if serving:
                log.info("ready", model=model.name, context_length=model.context_length)
            else:
                log.warning("not serving: no worker takes requests", seconds=settings.no_worker_timeout)

    running = asyncio.create_task(run_engine())
    announcing = asyncio.create_task(announce())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((running, keeping, stopping), return_when=asyncio.FIRST_COMPLETED)
    log.info("stopping", requests=len(engine.requests))
    announcing.cancel()
    front_ends.tell_serving(serving=False)
    await engine.drain(settings.grace)
    admin.close()
    front_ends.say_goodbye()
    tasks = (announcing, running, stopping)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def _spare_the_collector() -> None:
    """Have Python's cycle collector ignore the objects that exist at the start, and seldom look at the others.

    Requests and sessions are not left to the collector: they are freed when their call or their session ends. What is
    left are small cycles, such as those of gRPC's exceptions.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 1)
