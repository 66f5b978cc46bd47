"""The port of the HTTP API among strangers: how many connections, for how long, with which certificates."""

import asyncio
import contextlib
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web
from certificates import fill, strangers
from http_edge import http_edge

from pagewire_common.connection.tls import OPEN, Security, TlsFolder
from pagewire_common.start_error import StartError
from scheduler_service.frontend.http import server as http_server
from scheduler_service.frontend.http import writing
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.cors import Origins
from scheduler_service.frontend.http.limits import Limits
from scheduler_service.frontend.http.server import HttpServer
from scheduler_service.frontend.link.engine_link import EngineLink

HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
HERE = "https://chat.example.com"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def server(security: Security = OPEN, **limits: Any) -> AbstractAsyncContextManager[str]:
    """Without an engine."""
    return http_edge(EngineLink("127.0.0.1:1"), Limits(**limits), security)


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
        server(max_connections=2) as url,
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


@pytest.mark.parametrize(
    ("allowed", "answered"), [([], None), (["*"], "*"), ([HERE], HERE), (["https://other.example"], None)]
)
async def test_pages_of_allowed_origins_may_read_answers_and_errors(allowed: list[str], answered: str | None) -> None:
    asked = {
        "Origin": HERE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    origins = Origins(frozenset(allowed))
    async with (
        http_edge(EngineLink("127.0.0.1:1"), origins=origins) as url,
        aiohttp.ClientSession(url) as session,
        session.options("/v1/chat/completions", headers=asked) as preflight,
        session.get("/health", headers={"Origin": HERE}) as answer,
        session.post("/v1/none", headers={"Origin": HERE}) as error,
    ):
        for one in (preflight, answer, error):
            assert one.headers.get("Access-Control-Allow-Origin") == answered
        assert (answer.status, error.status) == (200, 404)
        assert preflight.status == (204 if allowed else 404)
        assert preflight.headers.get("Access-Control-Allow-Headers") == (
            asked["Access-Control-Request-Headers"] if answered else None
        )
        assert ("Vary" in answer.headers) is (allowed not in ([], ["*"]))


async def test_what_is_no_http_is_told_so_in_the_form_of_other_errors_and_not_quoted() -> None:
    heads = (b"quoted\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", HEAD.replace(b"Host", b"Ho st"), HEAD[:-2] + b"x" * 10_000)
    broken = BODY.replace(b"Content-Length: 10", b"Transfer-Encoding: chunked").replace(b"{", b"quoted\r\n")
    async with asyncio.timeout(30), server() as url:
        for request in (*heads, broken):
            async with connection(url) as (reader, writer):
                writer.write(request)
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.split()[1] == b"400"
            assert b"quoted" not in body
            assert json.loads(body)["error"]["code"] == "invalid_request"


async def test_a_client_that_reads_nothing_of_a_whole_answer_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def large(_: object) -> web.Response:
        return web.Response(body=bytes(32 << 20))  # more than the kernel's buffers take

    monkeypatch.setattr(http_server, "find_route", lambda *_: large)
    monkeypatch.setattr(writing, "STALL_SECONDS", 0.05)
    async with asyncio.timeout(30), server(max_connections=1) as url, connection(url) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(HEAD.replace(b"health", b"x"))
        while True:  # until its place is free
            async with connection(url) as again:
                if await is_answered(again):
                    break


async def test_an_unforeseen_error_within_a_stream_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(call: Call) -> web.StreamResponse:
        await writing.write(await writing.begin_events(call.request), b"data: 1\n\n")
        raise KeyError

    monkeypatch.setattr(http_server, "find_route", lambda *_: failing)
    async with (
        asyncio.timeout(30),
        server() as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/x") as answer,
    ):
        with pytest.raises(aiohttp.ClientError):
            await answer.read()


async def test_it_listens_on_addresses_of_ipv6_too_and_an_address_in_use_is_one_sentence() -> None:
    one = HttpServer(EngineLink("127.0.0.1:1"), Limits())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=f"cannot listen on {listen}"):
            await one.start(listen)
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            listen = f"[::1]:{probe.getsockname()[1]}"
    except OSError:
        pytest.skip("this machine has no IPv6")
    other = HttpServer(EngineLink("127.0.0.1:1"), Limits())
    await other.start(listen)
    async with aiohttp.ClientSession() as session, session.get(f"http://{listen}/health") as answer:
        assert answer.status == 200
    await other.stop()
    await one.stop()


async def test_connections_that_never_end_their_handshake_count_as_well(tmp_path: Path) -> None:
    tls = TlsFolder(fill(tmp_path, trustme.CA(), "localhost"))
    async with asyncio.timeout(30), server(Security(tls), max_connections=1) as url, connection(url):
        with pytest.raises((OSError, ssl.SSLError)):
            await asyncio.open_connection(
                "localhost", int(url.rpartition(":")[2]), ssl=tls.client_context(), ssl_handshake_timeout=20
            )


async def test_a_client_that_sends_its_head_byte_by_byte_is_cut_off_and_others_are_served_meanwhile() -> None:
    async with (
        asyncio.timeout(60),
        server(receive_seconds=1.0) as url,
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
        server(receive_seconds=0.5) as url,
        connection(url) as (reader, writer),
    ):
        writer.write(HEAD)
        assert b"HTTP/1.1 200 " in await reader.read()  # until it is closed


async def test_a_body_that_does_not_come_is_a_408() -> None:
    async with (
        asyncio.timeout(30),
        server(receive_seconds=0.5) as url,
        connection(url) as (reader, writer),
    ):
        writer.write(BODY)
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")


async def status(url: str, folder: Path | None) -> int:
    """0 where no connection comes about."""
    context = TlsFolder(folder).client_context() if folder is not None else ssl.create_default_context()
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(f"{url}/health", ssl=context) as answer:
                return answer.status
        except aiohttp.ClientConnectionError:
            return 0


async def test_with_mutual_tls_only_this_authoritys_certificates_open_the_port(tmp_path: Path) -> None:
    authority = trustme.CA()
    folder, good = fill(tmp_path / "server", authority, "localhost"), fill(tmp_path / "good", authority, "client")
    bad = strangers(tmp_path, authority)
    security = Security(TlsFolder(folder), mutual=True)
    async with server(security) as url:
        assert [await status(url, one) for one in (good, *bad, None)] == [200, 0, 0, 0, 0, 0]


@pytest.mark.usefixtures("at_once")
async def test_renewed_certificates_and_a_renewed_authority_hold_from_the_next_connection_on(tmp_path: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    folder = fill(tmp_path / "server", old, "localhost")
    clients = [fill(tmp_path / str(number), ca, "client") for number, ca in enumerate((old, new))]
    async with server(Security(TlsFolder(folder), mutual=True)) as url:
        assert [await status(url, client) for client in clients] == [200, 0]
        context = TlsFolder(clients[0]).client_context()
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/health", ssl=context) as answer:
                await answer.read()
            fill(folder, new, "localhost")
            async with asyncio.timeout(30):
                while await status(url, clients[1]) != 200:
                    pass
            assert await status(url, clients[0]) == 0
            async with session.get(f"{url}/health", ssl=context) as answer:  # its connection goes on
                assert answer.status == 200


SMUGGLED = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
FRAMINGS = [
    *(b"Content-Length: 0\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\nContent-Length: 0"),
    *(
        b"Content-Length: 0\r\nContent-Length: 34",
        b"Content-Length: 0, 34",
        b"Content-Length: +0",
        b"Content-Length: -1",
    ),
    *(b"Content-Length: 0x0", b"Content-Length: 0_0", b"Content-Length : 0", b"Content-Length: \xd9\xa0"),
    *(b"Transfer-Encoding: xchunked", b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding : chunked"),
    *(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", b"Transfer-Encoding: \x0bchunked"),
    *(b"Transfer-Encoding: chunked, chunked", b"X: a\x00b", b"X: a\rTransfer-Encoding: chunked", b"X\xa0: a"),
]
CHUNKS = [b"0x0", b"+0", b"-1", b"0_0", b" 0", b"0 ;a", b"0;a\nb", b"0\n", b"", b"g", b"1\r\nab"]
"""Sizes of a chunk that some parsers read in another way, and a chunk that is longer than it says."""


@pytest.mark.parametrize("method", [b"POST", b"GET"])
async def test_a_request_whose_length_can_be_read_in_two_ways_is_refused_and_hides_no_other(method: bytes) -> None:
    begun = method + b" /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    body = b"\r\n\r\n0\r\n\r\n"
    chunked = [b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\n\r\n" for size in CHUNKS]
    async with asyncio.timeout(60), server(receive_seconds=0.5) as url:

        async def statuses(framing: bytes) -> list[bytes]:
            async with connection(url) as (reader, writer):
                writer.write(begun + framing + SMUGGLED)
                return re.findall(rb"HTTP/1\.[01] (\d+)", await reader.read())

        assert len(await statuses(b"Content-Length: 5" + body)) == 2
        found = {framing: await statuses(framing) for framing in [*(one + body for one in FRAMINGS), *chunked]}
    assert {tuple(answers) for answers in found.values()} == {(b"400",)}, found
