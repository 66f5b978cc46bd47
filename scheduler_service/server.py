"""The scheduler process: servers, engine, and the order in which they start and stop."""

import asyncio
import gc

import structlog

from pagewire.v1 import admin_service_pb2, inference_service_pb2
from pagewire.v1.admin_service_pb2_grpc import add_AdminServiceServicer_to_server
from pagewire.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from pagewire_common.metrics import serve_metrics
from pagewire_common.server import GrpcServer, stop_event
from scheduler_service.admin_servicer import AdminServicer
from scheduler_service.engine import Engine
from scheduler_service.metrics import SchedulerMetrics
from scheduler_service.model import model_name
from scheduler_service.servicer import InferenceServicer
from scheduler_service.settings import SchedulerSettings

log = structlog.get_logger()


async def serve(settings: SchedulerSettings) -> None:
    """Serve until SIGTERM or SIGINT: admit nothing more, let streams finish for the grace period, return."""
    stop = stop_event()
    engine = Engine(settings)
    server = GrpcServer(
        [
            inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
            admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
        ],
        max_receive_bytes=16 << 20,  # prompts of contexts of more than a million tokens
        max_request_bytes=lambda: engine.max_request_bytes,
    )
    add_InferenceServiceServicer_to_server(InferenceServicer(engine), server.server)
    admin = AdminServicer(engine)
    add_AdminServiceServicer_to_server(admin, server.server)
    metrics = SchedulerMetrics(engine, model_name(settings.model), vllm_names=settings.vllm_metric_names)
    async with serve_metrics(settings.metrics_listen, metrics.families):
        await server.start(settings.listen)
        await _run(settings, engine, server, admin, stop)


async def _run(
    settings: SchedulerSettings, engine: Engine, server: GrpcServer, admin: AdminServicer, stop: asyncio.Event
) -> None:
    async def announce() -> None:
        model = await engine.wait_for_model()
        _spare_the_collector()
        async for serving in engine.watch_health():
            await server.set_serving(serving)
            if serving:
                log.info("ready", model=model.name, context_length=model.context_length)
            else:
                log.warning("not serving: no worker takes requests", seconds=settings.no_worker_timeout)

    async def drain(grace: float) -> None:
        await engine.drain(grace)
        admin.close()

    running = asyncio.create_task(engine.run())
    announcing = asyncio.create_task(announce())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    log.info("stopping", requests=len(engine.requests))
    await server.stop(drain, settings.grace)
    for task in (announcing, running, stopping):
        task.cancel()
    for result in await asyncio.gather(announcing, running, stopping, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    log.info("stopped")


def _spare_the_collector() -> None:
    """Have Python's cycle collector ignore the objects that exist at the start.

    The tokenizer library alone brings half a million objects that live as long as the process. Collecting them again
    and again took a third of this process's time under load, in pauses of a tenth of a second. Requests and sessions
    are not left to the collector: they are freed when their call or their session ends. What is left are small cycles,
    such as those of gRPC's exceptions. The last generation is collected about once in 100,000 new objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 1)
