"""Images at URLs come from allowed hosts with public addresses alone, whatever name servers and redirects say."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from ipaddress import ip_address
from typing import Any

import pytest
import trustme
from aiohttp import web

from scheduler_service.frontend.http.images import fetching, http_answer
from scheduler_service.frontend.http.images.addresses import MAX_LOOKUPS, is_public, look_up
from scheduler_service.frontend.http.images.fetching import MAX_AT_ONCE, MAX_OF_ONE, BusyError, FetchError, Media

IMAGE = b"\x89PNG" + bytes(range(256))
HOST = "images.test"


class Site:
    """A server on this machine, whose host has a name of this test alone. `hits`: the paths that were asked for."""

    def __init__(self) -> None:
        self.hits: list[str] = []
        self.lookups = 0
        self.answers = ["127.0.0.1"]
        self.port = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.hits.append(request.path)
        match request.path:
            case "/image":
                return web.Response(body=IMAGE)
            case "/encoded":
                return web.Response(body=IMAGE, headers={"Content-Encoding": "gzip"})
            case "/silent":
                await asyncio.Event().wait()
        target = request.query.get("to")
        return web.Response(status=302, headers={"Location": target}) if target else web.Response(status=404)

    async def lookup(self, host: str) -> list[str]:
        self.lookups += 1
        assert host == HOST
        return self.answers

    def media(self, is_allowed: Callable[[str], bool] = lambda address: ip_address(address).is_loopback) -> Media:
        return Media([f"{HOST}:{self.port}"], lookup=self.lookup, is_allowed=is_allowed)

    def url(self, path: str) -> str:
        return f"http://{HOST}:{self.port}{path}"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    found = Site()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", found.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        server = web.TCPSite(runner, "127.0.0.1", 0)
        await server.start()
        found.port = runner.addresses[0][1]
        yield found
    finally:
        await runner.cleanup()


def ignored(_: int) -> None: ...


async def test_an_image_comes_from_the_checked_address_and_the_environments_proxies_are_ignored(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    taken: list[int] = []
    assert await site.media().fetch(site.url("/image"), taken.append) == IMAGE
    assert sum(taken) == len(IMAGE)
    assert site.lookups == 1


async def test_up_to_three_redirects_within_the_rules_are_followed(site: Site) -> None:
    there = "/image"
    for _ in range(3):
        there = f"/again?to={there.replace('?', '%3F').replace('&', '%26')}"
    assert await site.media().fetch(site.url(there), ignored) == IMAGE
    with pytest.raises(FetchError, match="redirects more than 3 times"):
        await site.media().fetch(site.url("/again?to=" + there.replace("?", "%3F")), ignored)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("http://127.0.0.1/image", r"names the host 127\.0\.0\.1:80, which --allow-media-host does not allow"),
        ("http://169.254.169.254/latest/meta-data", "does not allow"),
        ("file:///etc/passwd", "the scheme 'file'; it must be http, https or data"),
        ("ftp://images.test/x", "the scheme 'ftp'"),
        ("//other.test/image", r"names the host other\.test:80"),
    ],
)
async def test_redirects_obey_the_same_rules(site: Site, target: str, reason: str) -> None:
    with pytest.raises(FetchError, match=f"it redirects to a URL that .*{reason}"):
        await site.media().fetch(site.url(f"/away?to={target}"), ignored)
    assert site.hits == ["/away"]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/passwd", "the scheme 'file'; it must be http, https or data"),
        ("x", "the scheme ''"),
        ("", "the scheme ''"),
        ("http://", "names no host"),
        ("http://[::1", "is invalid"),
        ("http://images.test:99999/", "is invalid"),
        ("https://images.test/", r"names the host images\.test:443, which --allow-media-host does not allow"),
        ("http://images.test.evil.test/", "does not allow"),
        ("http://user:password@images.test/", "contains a user or a password"),
        ("http://images.test/" + "x" * 5000, "has more than 4096 characters"),
    ],
)
async def test_other_urls_are_refused_without_a_connection(site: Site, url: str, reason: str) -> None:
    with pytest.raises(FetchError, match=f"the URL .*{reason}"):
        await site.media().fetch(url, ignored)
    assert site.lookups == 0


async def test_a_host_needs_public_addresses_alone(site: Site) -> None:
    """Also if an allowed host has a private address beside a public one, or is named by its address."""
    for answers in (["127.0.0.1"], ["93.184.215.14", "10.0.0.1"], ["::ffff:169.254.169.254"], ["fe80::1%lo"]):
        site.answers = answers
        with pytest.raises(FetchError, match=r"the host images\.test has an address that is not public"):
            await site.media(is_public).fetch(site.url("/image"), ignored)
    for host in ("127.0.0.1", "2130706433", "127.1", "0177.0.0.1", "[::1]", "[::ffff:7f00:1]"):
        media = Media([f"{host}:{site.port}"], lookup=site.lookup)
        with pytest.raises(FetchError, match=r"an address that is not public|is invalid"):
            await media.fetch(f"http://{host}:{site.port}/image", ignored)
    site.answers = []
    with pytest.raises(FetchError, match=r"the host images\.test has no address"):
        await site.media().fetch(site.url("/image"), ignored)
    assert site.hits == []


async def test_a_name_server_that_answers_twice_differently_is_asked_once(site: Site) -> None:
    """The second answer would be private; the connection goes to the checked address of the first."""

    async def lookup(host: str) -> list[str]:
        site.lookups += 1
        return ["127.0.0.1"] if site.lookups == 1 else ["10.0.0.1"]

    media = Media([f"{HOST}:{site.port}"], lookup=lookup, is_allowed=lambda address: address == "127.0.0.1")
    assert await media.fetch(site.url("/image"), ignored) == IMAGE
    with pytest.raises(FetchError, match="not public"):
        await media.fetch(site.url("/image"), ignored)


async def test_a_name_server_that_does_not_answer_leaves_the_threads_of_other_work_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()

    def wait(*_: object, **__: object) -> list[Any]:
        answers.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    lookups = [asyncio.create_task(look_up(HOST)) for _ in range(MAX_LOOKUPS)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await asyncio.to_thread(answers.set)
    assert await asyncio.gather(*lookups) == [[]] * MAX_LOOKUPS


PUBLIC = ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "64:ff9b::5db8:d70e", "::ffff:93.184.215.14"]
PRIVATE = [
    *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1", "192.168.0.1", "192.0.2.1"),
    *("198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fc00::1", "fe80::1", "fec0::1"),
    *("ff02::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
    *("2002:7f00:1::1", "2001:0:4136:e378:8000:63bf:80ff:fffe", "fe80::1%eth0", "images.test", "", "127.1"),
]


def test_private_addresses_have_many_forms() -> None:
    assert [address for address in PUBLIC if not is_public(address)] == []
    assert [address for address in PRIVATE if is_public(address)] == []


async def test_what_a_host_answers_is_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> Any:
        raise FetchError("it is too large")

    for path, take, reason in (
        ("/image", refuse, "it is too large"),
        ("/none", ignored, "answers with status 404"),
        ("/encoded", ignored, "a Content-Encoding that was not asked for"),
    ):
        with pytest.raises(FetchError, match=reason):
            await site.media().fetch(site.url(path), take)
    monkeypatch.setattr(fetching, "SECONDS", 0.05)
    with pytest.raises(FetchError, match=r"did not arrive within 0\.05 s"):
        await site.media().fetch(site.url("/silent"), ignored)
    monkeypatch.undo()
    port, site.port = site.port, 1
    with pytest.raises(FetchError, match="the connection failed"):
        await site.media().fetch(site.url("/image"), ignored)
    site.port = port


@pytest.mark.parametrize(
    ("first", "rest", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n", "a head or a line of more than 32768 bytes"),
        (b"HTTP/1.1 200 ", b"O", "a head or a line of more than 32768 bytes"),
        (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n", "too many interim answers"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\na\r\n", "too small chunks"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1", b";a=b", "of more than 32768 bytes"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n", b"a", "invalid chunks"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n", b"abc\r\n", "invalid chunks"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n", b"a", "Transfer-Encoding other than chunked"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", b"a", "an invalid Content-Length"),
        (b"HTTP/1.1 200 OK\r\n folded\r\n\r\n", b"a", "something other than HTTP"),
        (b"SSH-2.0\r\n\r\n", b"a", "something other than HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"a", "it is too large"),
    ],
)
async def test_an_answer_that_is_wrong_or_without_end_is_soon_refused(
    site: Site, first: bytes, rest: bytes, reason: str
) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(first)
            while True:
                writer.write(rest * 20_000)
                await writer.drain()
        writer.close()

    taken: list[int] = []

    def take(num_bytes: int) -> None:
        taken.append(num_bytes)
        if sum(taken) > 1 << 20:
            raise FetchError("it is too large")

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(5):
        site.port = server.sockets[0].getsockname()[1]
        with pytest.raises(FetchError, match=reason):
            await site.media().fetch(site.url("/image"), take)


@pytest.mark.parametrize("name", [HOST, "other.test"])
async def test_a_host_proves_its_name_by_a_certificate(name: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, theirs, ours = (
        trustme.CA(),
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH),
        ssl.create_default_context(),
    )
    authority.issue_cert(name).configure_cert(theirs)
    authority.configure_trust(ours)
    monkeypatch.setattr(http_answer, "_tls", lambda: ours)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert f"\r\nHost: {HOST}:{site.port}\r\n".encode() in head
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n\x89PNG\r\n100;a=b\r\n")
        writer.write(IMAGE[4:] + b"\r\n0\r\nTrailer: 1\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=theirs) as server, asyncio.timeout(5):
        site.port = server.sockets[0].getsockname()[1]
        fetched = site.media().fetch(site.url("/image").replace("http:", "https:"), ignored)
        if name == HOST:
            assert await fetched == IMAGE
        else:
            with pytest.raises(FetchError, match="the connection failed"):
                await fetched


async def test_the_next_address_of_a_host_is_tried_if_one_refuses(site: Site) -> None:
    site.answers = ["127.0.0.2", "127.0.0.1"]
    assert await site.media().fetch(site.url("/image"), ignored) == IMAGE


async def test_neither_a_slow_host_nor_a_busy_client_takes_all_places(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lookup(_: str) -> list[str]:
        return ["127.0.0.1"]

    media = Media(
        [f"{host}:{site.port}" for host in (HOST, "slow.test", "busy.test")], lookup=lookup, is_allowed=lambda _: True
    )
    slow, busy = (f"http://{host}:{site.port}/silent" for host in ("slow.test", "busy.test"))
    of_host = [asyncio.create_task(media.fetch(slow, ignored, str(client))) for client in range(MAX_AT_ONCE)]
    of_client = [asyncio.create_task(media.fetch(busy, ignored, "busy")) for _ in range(MAX_AT_ONCE - MAX_OF_ONE)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        assert await media.fetch(site.url("/image"), ignored, "other") == IMAGE
        monkeypatch.setattr(fetching, "SECONDS", 0.01)
        for url, client in ((slow, "other"), (site.url("/image"), "busy")):
            with pytest.raises(BusyError, match="too many images are being fetched; try again later"):
                await media.fetch(url, ignored, client)
    for task in (*of_host, *of_client):
        task.cancel()
    await asyncio.wait((*of_host, *of_client))
