"""Which certificates may read the metrics of a worker, which knows no keys."""

import asyncio
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import trustme
from certificates import fill
from prometheus_client.core import Metric

from pagewire_client.local import ServiceProcess
from pagewire_common.connection.tls import Security, TlsFolder
from pagewire_common.telemetry.metrics import serve_metrics
from worker_service.settings import WorkerSettings


async def nothing() -> list[Metric]:
    return []


def status_of(address: str, folder: Path) -> int:
    """What a reader with the certificate of this folder is answered."""
    try:
        url = f"https://localhost:{address.rpartition(':')[2]}/metrics"
        with urllib.request.urlopen(url, context=TlsFolder(folder).client_context()) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


async def test_a_certificate_needs_one_of_the_names_that_may_read(tmp_path: Path) -> None:
    authority = trustme.CA()
    tls = TlsFolder(fill(tmp_path / "worker", authority, "localhost"))
    found = {}
    async with serve_metrics(
        "127.0.0.1:0", nothing, Security(tls, mutual=True), readers=["scheduler", "prometheus"]
    ) as address:
        assert address is not None
        for name in ("scheduler", "prometheus", "worker"):
            folder = fill(tmp_path / f"as-{name}", authority, name)
            found[name] = await asyncio.to_thread(status_of, address, folder)
    assert found == {"scheduler": 200, "prometheus": 200, "worker": 403}


async def test_a_workers_metrics_are_for_its_scheduler_and_for_the_identity_that_it_is_told_of(
    tiny_model_directory: Path, tmp_path: Path
) -> None:
    authority = trustme.CA()
    folder = fill(tmp_path / "worker", authority, "localhost")
    arguments = ["--model", str(tiny_model_directory), "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    arguments += ["--tls", str(folder), "--mutual-tls", "--scheduler-identity", "scheduler"]
    worker = ServiceProcess("worker_service", [*arguments, "--metrics-identity", "prometheus"])
    try:
        address = str((await asyncio.to_thread(worker.wait_for, "metrics", 60))["address"])
        found = {}
        for name in ("scheduler", "prometheus", "client"):
            of_name = fill(tmp_path / name, authority, name)
            found[name] = await asyncio.to_thread(status_of, address, of_name)
    finally:
        await asyncio.to_thread(worker.stop)
    assert found == {"scheduler": 200, "prometheus": 200, "client": 403}


def test_an_identity_for_metrics_needs_certificates() -> None:
    with pytest.raises(ValueError, match="it needs --mutual-tls"):
        WorkerSettings(metrics_identity="prometheus")
