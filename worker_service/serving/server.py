"""Starts and stops a worker's gRPC server. The server binds its port before the model is loaded, so that health probes
are answered."""

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING, Any

import structlog

from pagewire.v1 import worker_service_pb2, worker_service_pb2_grpc
from pagewire_common.processes.temporary import remove_dead_folders
from pagewire_common.serving.server import GrpcServer, stop_event
from pagewire_common.telemetry.logs import configure_logging
from pagewire_common.telemetry.metrics import serve_metrics
from pagewire_common.telemetry.tracing import tracing
from worker_service.serving.device_thread import DeviceThread
from worker_service.serving.servicer import WorkerServicer
from worker_service.settings import WorkerSettings

if TYPE_CHECKING:
    from worker_service.execution.worker import Worker

log = structlog.get_logger()

SERVICE_NAME = worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name


async def serve(settings: WorkerSettings) -> None:
    """Run the server until SIGTERM or SIGINT. Raises StartError if the worker cannot start.

    If this process can no longer use the GPU, it exits with status 1, because only a new process can use the GPU
    again."""
    started = time.monotonic()
    configure_logging(settings.log_level, settings.log_format)
    stop = stop_event()
    remove_dead_folders()
    device_thread = DeviceThread()
    security = settings.security(settings.scheduler_identity or "")
    server = GrpcServer([SERVICE_NAME], max_receive_bytes=64 << 20, security=security)
    async with tracing(settings.otlp_traces_endpoint, "pagewire-worker") as tracer:
        servicer = WorkerServicer(device_thread, tracer)
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
        async with serve_metrics(settings.metrics_listen, servicer.metrics, security, readers=settings.metrics_readers):
            await server.start(settings.listen)
            try:
                await _load(settings, device_thread, server, servicer, stop, started)
                await _first_of(stop, servicer.device_lost)
            finally:
                log.info("stopping", in_session=servicer.in_session)
                await server.stop(servicer.drain, 0.0 if servicer.device_lost.is_set() else settings.grace)
    if servicer.device_lost.is_set():
        log.error("the device cannot be used any more; this process ends, so that a new process can use it")
        logging.shutdown()
        os._exit(1)  # the clean-up of CUDA may hang
    if not device_thread.idle or servicer.is_encoding:
        # None of these can be interrupted, and Python aborts if a thread returns from C++ while the process ends.
        log.info("stopped", cut_off="a step, the loading of the model, or an image in the background")
        logging.shutdown()
        os._exit(0)
    log.info("stopped")


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _load(
    settings: WorkerSettings,
    device_thread: DeviceThread,
    server: GrpcServer,
    servicer: WorkerServicer,
    stop: asyncio.Event,
    started: float,
) -> None:
    """Load the model, and report the health status SERVING. Returns at once if `stop` is set."""
    log.info("loading", model=settings.model)
    loading = asyncio.wrap_future(device_thread.submit(lambda: _import_and_load(settings)))
    stopping = asyncio.create_task(stop.wait())
    either: set[asyncio.Future[Any]] = {loading, stopping}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        return
    stopping.cancel()
    worker = await loading
    servicer.set_ready(worker)
    await server.set_serving(True)
    log.info(
        "ready",
        model=worker.info.model_id,
        dtype=worker.info.dtype,
        device=worker.info.device,
        num_device_blocks=worker.limits.num_device_blocks,
        seconds=round(time.monotonic() - started, 2),
    )


def _import_and_load(settings: WorkerSettings) -> "Worker":
    # This import loads torch, which takes a second.
    from worker_service.execution.worker import load_worker

    return load_worker(settings)
