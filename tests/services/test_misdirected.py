"""A client that calls the wrong port, or in the wrong way, is told what to do, and at once."""

import math
import socket
from pathlib import Path

import grpc
import pytest
import structlog
import trustme
from certificates import fill
from fake_worker_service import FakeWorkerService, serving
from scheduler_in_process import scheduler

from pagewire_client import Client
from pagewire_client.admin import Admin
from pagewire_client.llm import collect
from pagewire_common.connection.tls import Security, TlsFolder
from pagewire_common.serving.server import GrpcServer
from pagewire_common.start_error import StartError
from scheduler_service.engine.worker_link.client import WorkerClient
from scheduler_service.engine.worker_link.errors import UnreachableError
from worker_service import progress

pytestmark = pytest.mark.timeout(30)  # clients would try again for a minute


@pytest.mark.parametrize("target", ["localhost", "127.0.0.1", "", "[::1]", "a.example:", "::1"])
async def test_a_target_needs_a_port(target: str) -> None:
    for kind in (Client, Admin):
        with pytest.raises(ValueError, match=r"has no port; give it as HOST:PORT, such as .*:50051"):
            kind(target)


@pytest.mark.parametrize(
    ("target", "reason"),
    [("http://127.0.0.1:50051", "is a URL"), ("127.0.0.1:99999", r"must be in \[1, 65535\]"), ("dns:a", "has no port")],
)
async def test_a_target_that_cannot_be_one_is_refused(target: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Client(target)


@pytest.mark.parametrize("prefix", ["", "ipv4:", "ipv4:///"])
async def test_a_target_may_have_grpcs_own_form(prefix: str) -> None:
    async with (
        scheduler("127.0.0.1:1", no_worker_timeout=0.05) as one,
        Client(prefix + one.target, retry_for=0) as client,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="no worker took requests"):
            await client.get_model()


@pytest.mark.parametrize("missing", ["tls.key", "tls.crt"])
def test_a_certificate_without_its_key_is_refused_by_name(missing: str, tmp_path: Path) -> None:
    (fill(tmp_path, trustme.CA(), "localhost") / missing).unlink()
    with pytest.raises(ValueError, match=rf"{tmp_path}: it has no {missing}; tls\.crt and tls\.key belong together"):
        Client("127.0.0.1:1", tls=tmp_path)


@pytest.mark.parametrize(("name", "said"), [("ca.crt", "ca.crt"), ("tls.crt", "tls.crt and tls.key")])
def test_a_file_that_is_no_certificate_is_refused_by_name(name: str, said: str, tmp_path: Path) -> None:
    (fill(tmp_path, trustme.CA(), "localhost") / name).write_text("garbage")
    with pytest.raises(ValueError, match=f"{tmp_path}: {said} cannot be read as PEM"):
        Client("127.0.0.1:1", tls=tmp_path)


@pytest.mark.parametrize(
    ("name", "is_expired", "has_authority", "sentence"),
    [
        ("127.0.0.1", False, False, "has expired, or is signed by no authority in the ca.crt of --tls"),
        ("127.0.0.1", True, True, "has expired, or is signed by no authority in the ca.crt of --tls"),
        ("elsewhere", False, True, "is not for 127.0.0.1"),
    ],
)
async def test_a_certificate_that_is_refused_is_said_at_once(
    name: str, is_expired: bool, has_authority: bool, sentence: str, tmp_path: Path
) -> None:
    authority = trustme.CA()
    served = TlsFolder(fill(tmp_path / "server", authority, name, is_expired=is_expired))
    server = GrpcServer([], max_receive_bytes=1 << 20, security=Security(served))
    target = await server.start("127.0.0.1:0")
    trusted = fill(tmp_path / "client", authority, "client", trusts=authority if has_authority else trustme.CA())
    async with Client(target, tls=trusted, retry_for=math.inf) as client:
        for call in (client.get_model, client.wait_until_serving, lambda: collect(client, "hello")):
            with pytest.raises(grpc.aio.AioRpcError, match=f"the certificate of {target} {sentence}"):
                await call()
    await server.server.stop(None)


@pytest.mark.parametrize("mutual", [False, True])
async def test_plain_text_at_a_port_that_speaks_tls(mutual: bool, tmp_path: Path) -> None:
    security = Security(TlsFolder(fill(tmp_path, trustme.CA(), "localhost")), mutual)
    server = GrpcServer([], max_receive_bytes=1 << 20, security=security)
    target = await server.start("127.0.0.1:0")
    sentence = f"{target} speaks TLS: give --tls a folder with the ca.crt of its certificate"
    async with Client(target) as client:
        with pytest.raises(grpc.aio.AioRpcError, match=sentence):
            await client.get_model()
        with pytest.raises(grpc.aio.AioRpcError, match=sentence):
            await collect(client, "hello")
        with pytest.raises(grpc.aio.AioRpcError, match=sentence):
            await client.wait_until_serving()
    with pytest.raises(UnreachableError, match="give --worker-tls a folder"):
        await (worker := WorkerClient(target)).get_info()
    await worker.close()
    await server.server.stop(None)


async def test_tls_at_a_port_that_does_not_speak_it(tmp_path: Path) -> None:
    folder = fill(tmp_path, trustme.CA(), "localhost")
    server = GrpcServer([], max_receive_bytes=1 << 20)
    target = await server.start("127.0.0.1:0")
    async with Client(target, tls=folder) as client:
        with pytest.raises(grpc.aio.AioRpcError, match=f"{target} does not speak TLS: leave --tls out"):
            await client.get_model()
    await server.server.stop(None)


async def test_the_port_of_another_service(byte_tokenizer_directory: Path) -> None:
    async with serving(FakeWorkerService(byte_tokenizer_directory)) as address, scheduler(address) as one:
        for target in (address, one.admin_target):
            async with Client(target) as client:
                with pytest.raises(grpc.aio.AioRpcError, match="clients call the scheduler's --listen"):
                    await client.get_model()
        async with Admin(one.target) as admin:
            for call in (admin.state, admin.reset_prefix_cache):
                with pytest.raises(grpc.aio.AioRpcError, match="call the scheduler's --admin-listen"):
                    await call()


async def test_an_operators_port_in_use_is_named_with_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match="in use by another process; end that one, or give --admin-listen another"):
            async with scheduler("127.0.0.1:1", admin_listen=listen):
                pass


@pytest.mark.parametrize(
    ("listen", "reason"),
    [("192.0.2.1:0", "192.0.2.1 is not an address of this machine"), ("no.invalid:0", "no.invalid cannot be resolved")],
)
async def test_an_address_that_is_not_ours_is_told_from_a_port_in_use(listen: str, reason: str) -> None:
    with pytest.raises(StartError, match=f"--listen: cannot listen on {listen}: {reason}"):
        await GrpcServer([], max_receive_bytes=1 << 20).start(listen)


def test_progress_is_a_line_of_the_log_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with structlog.testing.capture_logs() as logs, progress.byte_progress("loading weights", 100) as bar:
        for _ in range(10):
            now += 2.0
            bar.update(10)
    assert [(one["event"], one["stage"], one["done"], one["total"]) for one in logs] == [
        ("loading", "loading weights", done, 100) for done in (30, 60, 90)
    ]
