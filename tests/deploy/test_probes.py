"""The services answer the probes of deploy/kubernetes, also before they are ready."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kustomize import KUBERNETES, container, render

from pagewire_client.local import ServiceProcess

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(params=["scheduler", "worker"])
def service(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def address(service: str, tmp_path: Path) -> Iterator[str]:
    """A service that is never ready: a scheduler without a worker, or a worker whose model is never read to the end."""
    os.mkfifo(tmp_path / "config.json")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        arguments = {
            "scheduler": ["--workers", f"127.0.0.1:{silent.getsockname()[1]}"],
            "worker": ["--model", str(tmp_path)],
        }
        process = ServiceProcess(f"{service}_service", ["--listen", "127.0.0.1:0", *arguments[service]])
        try:
            yield str(process.wait_for("listening", 60)["address"])
        finally:
            process.process.kill()
            process.stop()


def test_a_service_that_is_not_ready_is_started_and_alive(service: str, address: str) -> None:
    (deployment,) = (
        one for one in render(KUBERNETES / "cpu") if (one["kind"], one["metadata"]["name"]) == ("Deployment", service)
    )
    of_pod = container(deployment)
    with grpc.insecure_channel(address) as channel:

        def asked_by(probe: str) -> int:
            request = health_pb2.HealthCheckRequest(service=of_pod[probe]["grpc"]["service"])
            return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=30).status)

        assert asked_by("startupProbe") == SERVING
        assert asked_by("readinessProbe") == NOT_SERVING
        assert asked_by("livenessProbe") == SERVING
