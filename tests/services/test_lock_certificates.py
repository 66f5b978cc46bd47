"""Which certificate opens which port, before and after they are renewed: ports of a scheduler and a worker.

All want certificates of one authority.
"""

import asyncio
import contextlib
import hashlib
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc
import pytest
import trustme
from certificates import fill, strangers
from cluster import OWN
from locked import OPEN, code_of, methods
from ports import free_address
from test_processes import WORKER_SIZES

from pagewire_client.channel import connect, key_metadata
from pagewire_client.local import ServiceProcess
from pagewire_common.connection.tls import TlsFolder, secure_channel

KEY = "key of an operator"
SERVERS = ("scheduler", "worker")
BY_GRPC = ("clients", "operators", "worker")
BY_HTTPS = ("metrics", "worker's metrics", "http")


@dataclass
class Locked:
    """Every port by what it is for, and the authority of the moment."""

    folder: Path
    authority: trustme.CA
    ports: dict[str, str]
    worker: ServiceProcess
    worker_arguments: list[str]

    def certificate(self, name: str, authority: trustme.CA | None = None) -> Path:
        """A client's, which trusts the servers' authority."""
        return fill(self.folder / name, authority or self.authority, name, trusts=self.authority)

    def renew(self, authority: trustme.CA) -> None:
        self.authority = authority
        for name in SERVERS:
            fill(self.folder / name, authority, name, "localhost", "127.0.0.1")

    async def reaches(self, port: str, tls: Path | None) -> bool:
        """Whether a client with this folder gets an answer, whichever."""
        address = self.ports[port].replace("127.0.0.1", "localhost")
        if port in BY_GRPC:
            async with secure_channel(address, TlsFolder(tls) if tls else None, OWN) as channel:
                return await code_of(channel, f"{OPEN}Check", None) is grpc.StatusCode.OK
        scheme, context = ("https", TlsFolder(tls).client_context()) if tls else ("http", ssl.create_default_context())
        async with aiohttp.ClientSession() as session:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with session.get(f"{scheme}://{address}/metrics", ssl=context) as answer:
                    return answer.status in (200, 401)
        return False

    async def complete(self) -> int:
        """The status of a request over HTTP for tokens, which goes through all of them."""
        headers = {"Authorization": f"Bearer {KEY}"}
        context = TlsFolder(self.certificate("client")).client_context()
        url = f"https://{self.ports['http'].replace('127.0.0.1', 'localhost')}/v1/completions"
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(url, json={"prompt": "a", "max_tokens": 2}, ssl=context) as answer,
        ):
            return answer.status


@pytest.fixture(scope="module")
def locked(tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    folder, authority = tmp_path_factory.mktemp("locked"), trustme.CA()
    for name in SERVERS:
        fill(folder / name, authority, name, "localhost", "127.0.0.1")
    keys = folder / "keys.toml"
    keys.write_text(
        f'[[key]]\nid = "a"\nsha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"\ntenant = ""\nadmin = true\n'
    )
    address = free_address()
    metrics = ("--metrics-listen", "127.0.0.1:0")
    worker_arguments = [
        *("--listen", address, "--model", str(tiny_model_directory), *WORKER_SIZES, *metrics),
        *("--tls", str(folder / "worker"), "--mutual-tls", "--scheduler-identity", "scheduler"),
        *("--metrics-identity", "client"),
    ]
    scheduler_arguments = [
        *("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--model", str(tiny_model_directory), *metrics),
        *("--workers", address, "--worker-tls", str(folder / "scheduler"), "--worker-identity", "worker"),
        *("--tls", str(folder / "scheduler"), "--mutual-tls", "--api-keys", str(keys)),
        *("--http-listen", "127.0.0.1:0"),
    ]
    with ExitStack() as stack:
        worker = ServiceProcess("worker_service", worker_arguments)
        stack.callback(worker.stop)
        ports = {"worker": address, "worker's metrics": str(worker.wait_for("metrics", 60)["address"])}
        scheduler = ServiceProcess("scheduler_service", scheduler_arguments)
        stack.callback(scheduler.stop)
        for port, event in (("metrics", "metrics"), ("operators", "admin listening")):
            ports[port] = str(scheduler.wait_for(event, 60)["address"])
        listening = scheduler.wait_for("listening", 60)
        ports |= {"clients": str(listening["address"]), "http": str(listening["http"])}
        scheduler.wait_for("ready", 60)
        found = Locked(folder, authority, ports, worker, worker_arguments)
        yield found
        found.worker.process.kill()
        found.worker.stop()


@pytest.mark.parametrize("port", [*BY_GRPC, *BY_HTTPS])
async def test_a_port_is_reached_with_a_certificate_of_the_authority_alone(locked: Locked, port: str) -> None:
    good = locked.certificate("client")
    bad = [*strangers(locked.folder, locked.authority), None]
    assert [await locked.reaches(port, tls) for tls in (good, *bad)] == [True, False, False, False, False, False]


async def test_every_method_of_a_worker_is_the_schedulers_but_health(locked: Locked) -> None:
    own, other = locked.folder / "scheduler", locked.certificate("client")
    address = locked.ports["worker"].replace("127.0.0.1", "localhost")
    closed = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED}
    async with connect(address, own) as channel:
        listed = await methods(channel, None)
        assert {method.split("/")[1] for method in listed} >= {"pagewire.v1.WorkerService", "grpc.health.v1.Health"}
        for method in listed:
            if not method.endswith("/Execute"):  # it would take the worker from its scheduler
                assert await code_of(channel, method, key_metadata("any")) not in closed, method
    for tls in (other, *strangers(locked.folder, locked.authority), None):
        expected = grpc.StatusCode.PERMISSION_DENIED if tls is other else grpc.StatusCode.UNAVAILABLE
        async with connect(address, tls) as channel:
            found = {method: await code_of(channel, method, None) for method in listed}
        is_health = {method: method.startswith(OPEN) and tls is other for method in listed}
        assert {code for method, code in found.items() if not is_health[method]} == {expected}


async def test_changed_certificates_of_another_authority_hold_at_every_port_and_between_the_services(
    locked: Locked,
) -> None:
    before = fill(locked.folder / "before", locked.authority, "client", trusts=locked.authority)
    assert await locked.complete() == 200
    locked.renew(trustme.CA())
    after = fill(locked.folder / "after", locked.authority, "client", trusts=locked.authority)
    for port in (*BY_GRPC, *BY_HTTPS):
        async with asyncio.timeout(30):
            while not await locked.reaches(port, after):
                pass
        assert not await locked.reaches(port, before), port
    locked.worker.process.kill()
    locked.worker.stop()
    locked.worker = ServiceProcess("worker_service", locked.worker_arguments)
    locked.ports["worker's metrics"] = str((await asyncio.to_thread(locked.worker.wait_for, "metrics", 60))["address"])
    assert await locked.complete() == 200  # which waits for the worker
