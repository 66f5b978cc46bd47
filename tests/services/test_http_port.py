"""The port of the HTTP API among strangers: how many connections, for how long, with which certificates."""

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import trustme
from certificates import fill, strangers
from fake_worker_service import FakeWorkerService, serving
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from http_edge import http_edge
from locked import KEYRING, KEYS
from ports import free_address
from scheduler_in_process import scheduler

from pagewire_client.http.limits import Limits
from pagewire_client.http.upstream import Upstream
from pagewire_common.connection.tls import Security, TlsFolder
from pagewire_common.serving.server import GrpcServer
from pagewire_common.start_error import StartError

NOWHERE = "127.0.0.1:1"
HEAD = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connection(url: str) -> AsyncIterator[Streams]:
    host, _, port = url.rpartition("/")[2].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def is_answered(streams: Streams, request: bytes = HEAD) -> bool:
    """Whether there is an answer, whichever; otherwise the connection is closed."""
    reader, writer = streams
    try:
        writer.write(request)
        await writer.drain()
        return (await reader.readline()).startswith(b"HTTP/1.1 ")
    except ConnectionError:
        return False


async def test_connections_beyond_the_limit_are_closed_and_those_within_it_are_served() -> None:
    async with (
        asyncio.timeout(30),
        http_edge(NOWHERE, "m", Limits(max_connections=2)) as url,
        connection(url) as first,
    ):
        assert await is_answered(first)
        async with connection(url) as silent, connection(url) as beyond:
            assert not await is_answered(beyond)
            assert await is_answered(silent)
        while True:  # until the server has seen that its place is free
            async with connection(url) as again:
                if await is_answered(again):
                    break


async def test_connections_that_never_end_their_handshake_count_as_well(tmp_path: Path) -> None:
    tls = TlsFolder(fill(tmp_path, trustme.CA(), "localhost"))
    limits = Limits(max_connections=1)
    async with asyncio.timeout(30), http_edge(NOWHERE, "m", limits, security=Security(tls)) as url, connection(url):
        with pytest.raises((OSError, ssl.SSLError)):
            await asyncio.open_connection(
                "localhost", int(url.rpartition(":")[2]), ssl=tls.client_context(), ssl_handshake_timeout=20
            )


async def test_a_client_that_sends_its_head_byte_by_byte_is_cut_off_and_others_are_served_meanwhile() -> None:
    async with (
        asyncio.timeout(60),
        http_edge(NOWHERE, "m", Limits(receive_seconds=1.0)) as url,
        connection(url) as (reader, writer),
    ):
        writer.write(b"GET / HTTP/1.1\r\nX: ")
        cut = asyncio.create_task(reader.read())
        num_sent = num_served = 0
        while not cut.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b"x")
                await writer.drain()
            num_sent += 1
            async with connection(url) as other:
                num_served += await is_answered(other)
        with contextlib.suppress(ConnectionError):  # a byte came too late
            assert await cut == b""
        assert num_sent == num_served > 1


async def test_a_connection_that_is_idle_after_an_answer_is_closed() -> None:
    async with (
        asyncio.timeout(30),
        http_edge(NOWHERE, "m", Limits(receive_seconds=0.5)) as url,
        connection(url) as (reader, writer),
    ):
        writer.write(HEAD)
        assert b"HTTP/1.1 503 " in await reader.read()  # until it is closed


async def test_a_body_that_does_not_come_is_a_408(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, scheduler(address) as one:
        await one.engine.model()
        async with (
            asyncio.timeout(30),
            http_edge(one.target, "m", Limits(receive_seconds=0.5)) as url,
            connection(url) as (reader, writer),
        ):
            writer.write(BODY)
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")


async def status(url: str, folder: Path | None, key: str = "") -> int:
    """0 where no connection comes about."""
    context = TlsFolder(folder).client_context() if folder is not None else ssl.create_default_context()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        try:
            async with session.get(f"{url}/v1/models", ssl=context) as answer:
                return answer.status
        except aiohttp.ClientConnectionError:
            return 0


async def test_with_mutual_tls_only_this_authoritys_certificates_open_the_port(tmp_path: Path) -> None:
    authority = trustme.CA()
    folder, good = fill(tmp_path / "server", authority, "localhost"), fill(tmp_path / "good", authority, "client")
    bad = strangers(tmp_path, authority)
    security = Security(TlsFolder(folder), mutual=True)
    async with http_edge(NOWHERE, "m", security=security) as url:
        assert [await status(url, one) for one in (good, *bad, None)] == [503, 0, 0, 0, 0, 0]


@pytest.mark.usefixtures("at_once")
async def test_renewed_certificates_and_a_renewed_authority_hold_from_the_next_connection_on(tmp_path: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    folder = fill(tmp_path / "server", old, "localhost")
    clients = [fill(tmp_path / str(number), ca, "client") for number, ca in enumerate((old, new))]
    async with http_edge(NOWHERE, "m", security=Security(TlsFolder(folder), mutual=True)) as url:
        assert [await status(url, client) for client in clients] == [503, 0]
        context = TlsFolder(clients[0]).client_context()
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/v1/models", ssl=context) as answer:
                await answer.read()
            fill(folder, new, "localhost")
            async with asyncio.timeout(30):
                while await status(url, clients[1]) != 503:
                    pass
            assert await status(url, clients[0]) == 0
            async with session.get(f"{url}/v1/models", ssl=context) as answer:  # its connection goes on
                assert answer.status == 503


@pytest.mark.usefixtures("at_once")
async def test_serve_shows_the_scheduler_its_certificate_as_it_is_now(
    tmp_path: Path, byte_tokenizer_directory: Path
) -> None:
    """A stream under way goes on over the connection that it has."""
    old, new = trustme.CA(), trustme.CA()
    folder, own = fill(tmp_path / "server", old, "localhost"), fill(tmp_path / "own", old, "client")
    security = Security(TlsFolder(folder), mutual=True)
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with (
        serving(worker) as address,
        scheduler(address, security=security, keyring=KEYRING) as one,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEYS['gold']}"}) as session,
    ):
        await one.engine.model()
        target = one.target.replace("127.0.0.1", "localhost")
        async with asyncio.timeout(60), http_edge(target, "m", api_key=KEYS["gold"], tls=own) as url:
            asked = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True, "temperature": 0}
            async with session.post(f"{url}/v1/completions", json=asked) as stream:
                assert stream.status == 200
                await stream.content.readline()
                for renewed in (folder, own):
                    fill(tmp_path / "renewed", new, "localhost", "client")
                    for file in (tmp_path / "renewed").iterdir():
                        shutil.copy(file, renewed)
                async with session.get(f"{url}/v1/models") as answer:
                    assert answer.status == 200
                assert b"[DONE]" in await stream.content.read()


@pytest.mark.usefixtures("at_once")
async def test_a_scheduler_that_comes_back_with_another_authority_is_reached_with_certificates_of_it(
    tmp_path: Path,
) -> None:
    address = free_address()
    own = fill(tmp_path / "own", trustme.CA(), "client")
    upstream = Upstream(address.replace("127.0.0.1", "localhost"), own)
    for _ in range(2):
        authority = trustme.CA()
        fill(own, authority, "client")
        tls = TlsFolder(fill(tmp_path / "server", authority, "localhost"))
        server = GrpcServer([], max_receive_bytes=1 << 10, security=Security(tls, mutual=True))
        await server.start(address)
        async with asyncio.timeout(30), upstream.channel() as channel:
            await HealthStub(channel).Check(HealthCheckRequest(), wait_for_ready=True)
        await server.server.stop(None)
    await upstream.close()


def test_a_server_whose_scheduler_wants_certificates_that_are_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"it has neither tls\.crt and tls\.key nor ca\.crt"):
        Upstream("localhost:1", tmp_path)
