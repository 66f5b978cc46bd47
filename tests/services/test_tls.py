"""What a caller without the right certificate can do, and how certificates are renewed."""

import asyncio
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import structlog
import trustme
from certificates import fill, strangers
from cluster import OWN
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat
from fake_worker_service import FakeWorkerService, serving
from grpc_health.v1 import health_pb2, health_pb2_grpc
from locked import KEYRING, KEYS, OPEN, code_of, codes, key_file, refused
from scheduler_in_process import InProcess, scheduler
from test_processes import WORKER_SIZES, Start, start  # noqa: F401  # a fixture

from pagewire.v1 import admin_service_pb2, worker_service_pb2
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from pagewire_client import Client, SamplingParams
from pagewire_client.admin import Admin
from pagewire_client.channel import connect, key_metadata
from pagewire_client.llm import collect
from pagewire_common.connection import tls as tls_module
from pagewire_common.connection.tls import Security, TlsFolder, secure_channel
from pagewire_common.healthcheck import is_serving
from pagewire_common.start_error import StartError

_KEY = rsa.generate_private_key(65537, 2048)
ENCRYPTED = _KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@asynccontextmanager
async def by_tls(folder: Path, tokenizer: Path, **options: Any) -> AsyncIterator[InProcess]:
    worker, security = FakeWorkerService(tokenizer), Security(TlsFolder(folder), **options)
    async with serving(worker) as address, scheduler(address, security=security, keyring=KEYRING) as one:
        await one.engine.model()
        yield one


async def test_with_mutual_tls_only_this_authoritys_certificates_open_a_port(
    authority: trustme.CA, tmp_path: Path, byte_tokenizer_directory: Path
) -> None:
    folder, good = fill(tmp_path / "server", authority, "localhost"), fill(tmp_path / "good", authority, "client")
    async with by_tls(folder, byte_tokenizer_directory, mutual=True) as one:
        for target in (
            one.target.replace("127.0.0.1", "localhost"),
            one.admin_target.replace("127.0.0.1", "localhost"),
        ):
            found = await codes(target, KEYS["admin"], tls=good)
            assert grpc.StatusCode.UNAVAILABLE not in found.values()
            unlocked = await codes(target, "a wrong key", tls=good)
            assert grpc.StatusCode.UNAUTHENTICATED in unlocked.values()  # a certificate is no key
            for tls in (*strangers(tmp_path, authority), None):
                async with connect(target, tls) as channel:
                    ended = [await code_of(channel, method, key_metadata(KEYS["admin"])) for method in found]
                assert set(ended) == {grpc.StatusCode.UNAVAILABLE}


@pytest.mark.usefixtures("at_once")
async def test_a_server_takes_up_a_renewed_certificate_and_keeps_the_old_one_while_it_is_half_written(
    tmp_path: Path, byte_tokenizer_directory: Path
) -> None:
    old, new = trustme.CA(), trustme.CA()
    folder = fill(tmp_path / "server", old, "localhost")
    believers = [fill(tmp_path / str(number), ca, "client") for number, ca in enumerate((old, new))]

    async def works(target: str, believer: Path) -> bool:
        tls = TlsFolder(believer)
        async with secure_channel(target, tls, OWN) as channel:
            return await code_of(channel, f"{OPEN}Check", None) is grpc.StatusCode.OK

    async with by_tls(folder, byte_tokenizer_directory) as one:
        target = one.target.replace("127.0.0.1", "localhost")
        assert [await works(target, believer) for believer in believers] == [True, False]
        renewed = fill(tmp_path / "renewed", new, "localhost")
        (folder / "tls.crt").write_bytes((renewed / "tls.crt").read_bytes())  # the key is not there yet
        assert [await works(target, believer) for believer in believers] == [True, False]
        (folder / "tls.key").write_bytes((renewed / "tls.key").read_bytes())
        assert [await works(target, believer) for believer in believers] == [False, True]


def test_a_folder_that_cannot_be_used_is_a_sentence(authority: trustme.CA, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"it has neither tls\.crt and tls\.key nor ca\.crt"):
        TlsFolder(tmp_path)
    folder = fill(tmp_path / "a", authority, "a")
    (folder / "tls.key").write_bytes((fill(tmp_path / "b", authority, "b") / "tls.key").read_bytes())
    with pytest.raises(StartError, match="cannot use the certificates in"):
        TlsFolder(folder)
    for name in ("tls.crt", "tls.key"):
        (folder / name).unlink()
    with pytest.raises(StartError, match=r"a server needs tls\.crt and tls\.key"):
        TlsFolder(folder).server_credentials(mutual=False)
    folder = fill(tmp_path / "c", authority, "c")
    (folder / "ca.crt").unlink()
    with pytest.raises(StartError, match=r"clients' certificates are checked with ca\.crt"):
        TlsFolder(folder).server_credentials(mutual=True)


@pytest.mark.usefixtures("at_once")
def test_all_that_use_a_folder_see_that_it_has_changed(authority: trustme.CA, tmp_path: Path) -> None:
    folder = fill(tmp_path, authority, "localhost")
    with (folder / "ca.crt").open("a") as file:
        file.write("# Főtanúsítvány\n")
    tls = TlsFolder(folder)
    first = tls.refresh()
    tls.client_context()
    tls.server_context(mutual=True)
    fill(tmp_path, trustme.CA(), "localhost")
    assert tls.refresh() == tls.refresh() == first + 1
    (folder / "tls.key").chmod(0o600)
    assert tls.refresh() == first + 2  # whether it may be read has changed


class Clock:
    """Time as a folder sees it: in whole seconds, from its files' own time on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        clock = SimpleNamespace(time=lambda: 0.0, monotonic=lambda: 1.0 + self.seconds)
        patch.setattr(tls_module, "time", clock, raising=False)


def names_of(logs: Sequence[Any]) -> list[str]:
    return [one.get("reason", one["event"]).split(":")[0] for one in logs]


def test_files_that_are_being_replaced_are_used_once_they_are_whole(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of authorities that is cut off between two of them can be read, and so is one that is not there."""
    folder, clock, ca = fill(tmp_path, authority, "localhost"), Clock(monkeypatch), tmp_path / "ca.crt"
    both = ca.read_bytes() + trustme.CA().cert_pem.bytes()
    tls = TlsFolder(folder)
    before = tls._files
    with structlog.testing.capture_logs() as logs:
        for content in (None, b"", both[: len(both) // 2], both[: both.index(b"-----BEGIN", 9)], both):
            ca.unlink() if content is None else ca.write_bytes(content)
            for _ in range(2):
                assert tls.refresh() == 0
                clock.seconds += 0.4
        clock.seconds += 0.5
        assert tls.refresh() == 1
    assert (tls._files.authority, before.authority) == (both, authority.cert_pem.bytes())
    assert names_of(logs) == ["certificates read again"]


def test_a_reload_refuses_what_a_start_would_refuse_and_says_which(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, clock = fill(tmp_path, authority, "localhost"), Clock(monkeypatch)
    tls, whole = TlsFolder(folder), {file.name: file.read_bytes() for file in folder.iterdir()}
    other = trustme.CA().issue_cert("localhost").private_key_pem.bytes()
    for name, content, reason in (
        ("ca.crt", None, "ca.crt is missing; only after a restart does the server run without it"),
        ("tls.key", None, "it has no tls.key; tls.crt and tls.key belong together"),
        ("ca.crt", b"", "ca.crt cannot be read as PEM"),
        ("tls.key", other, "tls.crt and tls.key cannot be read as PEM"),
        ("tls.key", ENCRYPTED, "tls.crt and tls.key cannot be read as PEM"),
    ):
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
        with structlog.testing.capture_logs() as logs:
            for _ in range(4):
                assert tls.refresh() == 0
                clock.seconds += 1
            with pytest.raises(OSError, match=r"are being replaced|No such file|SSL|X509|the key is encrypted"):
                tls.server_context(mutual=True)
        assert names_of(logs) == [reason]
        assert logs[0]["folder"] == str(folder)
        (folder / name).write_bytes(whole[name])
    assert tls._files.authority == whole["ca.crt"]


def test_files_that_changed_long_ago_are_used_at_the_first_look(authority: trustme.CA, tmp_path: Path) -> None:
    """Else the first connection after an idle hour would be shown the old certificate."""
    tls = TlsFolder(fill(tmp_path, authority, "localhost"))
    fill(tmp_path, authority, "localhost")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tls_module, "time", SimpleNamespace(time=lambda: time.time() + 3600, monotonic=lambda: 1.0))
        assert tls.refresh() == 1


def scrape(address: str, authority: Path, key: str) -> int:
    """The status of a look at the metrics."""
    request = urllib.request.Request(f"https://{address}/metrics", headers={"Authorization": f"Bearer {key}"})
    context = TlsFolder(authority).client_context()
    try:
        with urllib.request.urlopen(request, context=context, timeout=10) as answer:
            assert b"pagewire_num_requests_running" in answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


async def test_everything_locked_at_once(
    start: Start,  # noqa: F811
    authority: trustme.CA,
    tmp_path: Path,
    tiny_model_directory: Path,
) -> None:
    worker_folder = fill(tmp_path / "worker", authority, "worker", "localhost", "127.0.0.1")
    scheduler_folder = fill(tmp_path / "scheduler", authority, "scheduler", "localhost", "127.0.0.1")
    client_folder = fill(tmp_path / "client", authority, "client")
    keys = key_file(tmp_path / "keys.toml", "gold", "admin")
    model = ("--model", str(tiny_model_directory))
    _, worker = await asyncio.to_thread(
        start,
        "worker_service",
        *(*model, *WORKER_SIZES, "--tls", str(worker_folder), "--mutual-tls", "--scheduler-identity", "scheduler"),
    )
    process, target = await asyncio.to_thread(
        start,
        "scheduler_service",
        *(*model, "--workers", worker, "--worker-tls", str(scheduler_folder), "--worker-identity", "worker"),
        *("--tls", str(scheduler_folder), "--api-keys", str(keys), "--metrics-listen", "127.0.0.1:0"),
    )

    async def outputs(name: str) -> int:
        async with Client(target, api_key=KEYS[name], tls=client_folder, retry_for=0) as client:
            completion = await collect(client, "hello", SamplingParams(max_tokens=3, ignore_eos=True))
            return len(completion.outputs[0].token_ids)

    async with Client(target, tls=client_folder, api_key=KEYS["gold"]) as client:
        await client.wait_until_serving(60)
    assert await outputs("gold") == 3
    assert await is_serving(worker, "", TlsFolder(client_folder))
    # A worker is the scheduler's alone, though the client's certificate is of the same authority.
    async with secure_channel(worker, TlsFolder(client_folder)) as channel:
        error = await refused(WorkerServiceStub(channel).GetWorkerInfo(worker_service_pb2.GetWorkerInfoRequest()))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        assert await code_of(channel, method, None) is grpc.StatusCode.PERMISSION_DENIED
        checked = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
    # A key is added to the file, and one that was there is taken out.
    error = await refused(outputs("iron"))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    key_file(keys, "iron", "admin")
    await asyncio.to_thread(process.wait_for, "API keys read again", 60)
    async with asyncio.timeout(60):
        while True:
            try:
                assert await outputs("iron") == 3
                break
            except grpc.aio.AioRpcError:
                continue
    assert (await refused(outputs("gold"))).code() is grpc.StatusCode.UNAUTHENTICATED
    keys.write_text("[[key]]\n")
    await asyncio.to_thread(process.wait_for, "changed API keys cannot be used; the old ones stay", 60)
    assert await outputs("iron") == 3


async def test_operators_and_metrics_need_an_operators_key(
    start: Start,  # noqa: F811
    authority: trustme.CA,
    tmp_path: Path,
) -> None:
    folder = fill(tmp_path / "scheduler", authority, "localhost", "127.0.0.1")
    keys = key_file(tmp_path / "keys.toml", "gold", "admin")
    from pagewire_client.local import ServiceProcess

    process = ServiceProcess(
        "scheduler_service",
        [
            *("--listen", "127.0.0.1:0", "--workers", "127.0.0.1:1", "--tls", str(folder), "--api-keys", str(keys)),
            *("--metrics-listen", "127.0.0.1:0"),
        ],
    )
    try:
        metrics = str((await asyncio.to_thread(process.wait_for, "metrics", 60))["address"])
        admin_target = str((await asyncio.to_thread(process.wait_for, "admin listening", 60))["address"])
        found = [await asyncio.to_thread(scrape, metrics, folder, key) for key in ("", KEYS["gold"], KEYS["admin"])]
        assert found == [401, 401, 200]
        with pytest.raises((urllib.error.URLError, ConnectionError)):  # plain text is no answer
            await asyncio.to_thread(urllib.request.urlopen, f"http://{metrics}/metrics", None, 10)
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            await asyncio.to_thread(
                urllib.request.urlopen,
                f"https://{metrics}/metrics",
                None,
                10,
                context=ssl.create_default_context(),
            )
        assert await asyncio.to_thread(scrape, metrics, folder, KEYS["admin"]) == 200
        async with Admin(admin_target, api_key=KEYS["admin"], tls=folder) as admin:
            assert isinstance((await admin.state()).state, admin_service_pb2.ClusterState)
        async with Admin(admin_target, api_key=KEYS["gold"], tls=folder) as admin:
            assert (await refused(admin.state())).code() is grpc.StatusCode.PERMISSION_DENIED
    finally:
        assert await asyncio.to_thread(process.stop) == 0
