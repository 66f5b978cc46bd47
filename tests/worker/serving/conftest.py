"""The tiny model behind the service, step by step and running ahead."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_decode_graphs import with_fake_graphs
from served_worker import Gate, Service

from pagewire.v1 import worker_service_pb2_grpc
from pagewire_common.serving.server import GrpcServer
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.execution.worker import Worker, load_worker
from worker_service.serving.device_thread import DeviceThread
from worker_service.serving.server import SERVICE_NAME
from worker_service.serving.servicer import WorkerServicer
from worker_service.settings import WorkerSettings


@pytest.fixture(scope="module", params=["step by step", "running ahead"])
def worker(request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    worker = load_worker(
        WorkerSettings(
            model=str(tiny_checkpoint),
            device="cpu",
            block_size=4,
            num_gpu_blocks_override=64,
            swap_space=1e-4,
            cache=tmp_path_factory.mktemp("cache"),
        )
    )
    if request.param == "step by step":
        return worker
    assert isinstance(worker.runner, ModelRunner)
    return replace(worker, runner=with_fake_graphs(worker.runner, worker.limits))


@pytest.fixture
async def loading() -> AsyncIterator[Service]:
    """A service whose model is not loaded yet."""
    server = GrpcServer([SERVICE_NAME], max_receive_bytes=1 << 20)
    servicer = WorkerServicer(DeviceThread())
    worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
    service = Service(servicer, server, await server.start("127.0.0.1:0"))
    yield service
    await service.channel.close()
    await server.stop(servicer.drain, 0)


@pytest.fixture
def service(loading: Service, worker: Worker) -> Service:
    loading.servicer.set_ready(worker)
    return loading


@pytest.fixture
def gate(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(worker, monkeypatch)
