"""OpenAI's API behind keys and TLS."""

import asyncio
import contextlib
import gzip
import json
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import trustme
from certificates import fill
from cluster import halted, is_busy
from http_requests import CHAT, MODEL
from locked import KEYS, key_file

from bench.serving import load
from pagewire.v1.admin_service_pb2 import ClusterState
from pagewire_client import LocalServer
from pagewire_client.admin import Admin
from pagewire_common.connection.tls import TlsFolder


@dataclass
class Served:
    scheduler: LocalServer
    folder: Path

    @property
    def address(self) -> str:
        return self.scheduler.http_url.rpartition("/")[2]

    @property
    def context(self) -> ssl.SSLContext:
        return TlsFolder(self.folder).client_context()

    def client(self, key: str) -> openai.AsyncOpenAI:
        http = openai.DefaultAsyncHttpxClient(verify=self.context)
        return openai.AsyncOpenAI(
            base_url=f"{self.scheduler.http_url}/v1", api_key=key, max_retries=0, http_client=http
        )

    async def state(self) -> ClusterState:
        async with Admin(self.scheduler.admin_target, api_key=KEYS["admin"], tls=self.folder) as admin:
            return (await admin.state()).state


@pytest.fixture(scope="module")
def served(tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = fill(tmp_path_factory.mktemp("tls"), trustme.CA(), "localhost", "127.0.0.1")
    keys = key_file(tmp_path_factory.mktemp("keys") / "keys.toml", *KEYS)
    blocks = ("--num-gpu-blocks-override", "128", "--block-size", "8", "--threads", "1", "--swap-space", "0")
    with LocalServer(
        str(tiny_model_directory),
        worker_arguments=blocks,
        scheduler_arguments=["--tls", str(folder), "--api-keys", str(keys), "--check-invariants"],
    ) as scheduler:
        yield Served(scheduler, folder)


@pytest.fixture
async def gold(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served.client(KEYS["gold"]) as client:
        yield client


@pytest.mark.parametrize(("key", "status"), [("gold", 403), ("admin", 200)])
async def test_metrics_are_for_keys_that_may_read_them(served: Served, key: str, status: int) -> None:
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=served.context)) as session,
        session.get(f"https://{served.address}/metrics", headers={"X-Api-Key": KEYS[key]}) as answer,
    ):
        assert answer.status == status
        assert ("pagewire_num_requests_running" in await answer.text()) is (status == 200)


async def test_a_key_opens_the_api_whole_and_streamed(gold: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in gold.models.list()] == [MODEL]
    words = {"temperature": 0, "max_tokens": 20}
    whole = await gold.chat.completions.create(model=MODEL, messages=CHAT, **words)
    stream = await gold.chat.completions.create(model=MODEL, messages=CHAT, stream=True, **words)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 5


@pytest.mark.parametrize("key", ["gold", "unknown"])
def test_a_load_is_sent_with_the_key_and_the_certificates(
    served: Served, key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--http", served.scheduler.http_url.replace("127.0.0.1", "localhost"), "--tls", str(served.folder)]
    sizes = ["--requests", "2", "--prompt-tokens", "4", "--output-tokens", "3"]
    monkeypatch.setattr(sys, "argv", ["bench", *where, *sizes])
    monkeypatch.setenv("PAGEWIRE_CLIENT_API_KEY", KEYS.get(key, key))
    if key == "gold":
        load.main()
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["output_tokens"] == 6
    else:
        with pytest.raises(SystemExit, match=r"answered 401: .*API key"):
            load.main()


async def test_what_an_echo_needs_is_not_asked_for_a_key_that_is_used_up(served: Served) -> None:
    async with served.client(KEYS["two"]) as client:
        found = await client.completions.create(model=MODEL, prompt=[5, 6], echo=True, logprobs=1, max_tokens=1)
        assert found.choices[0].logprobs.tokens[0]
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model=MODEL, prompt=["a"] * 250, echo=True, logprobs=1)


def raw(served: Served, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """The status and the rest of an answer to a request that libraries would not send so."""
    host, _, port = served.address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), 30) as plain,
        served.context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        connection.sendall(f"{head}\r\nHost: x\r\nConnection: close\r\n{length}\r\n".encode() + body)
        answer = b""
        with contextlib.suppress(ConnectionError, ssl.SSLError):  # it may be closed while the body is under way
            while piece := connection.recv(65536):
                answer += piece
    return int(answer.split()[1]), answer


def test_every_route_is_closed_without_a_key_but_health_and_the_files_of_the_page(served: Served) -> None:
    """Whether there is such a route is told to those alone that have a key."""
    paths = [
        "/v1/models",
        "/v1/edits",
        "/workers",
        "/page/feed",
        "/page/adapters",
        "/static/x",
        "/metrics",
        "/v1/../workers",
        "/flush_cache",
        "/%0a",
    ]
    lines = [f"GET {path}" for path in paths]
    lines += [f"POST /v1/{path}" for path in ("chat/completions", "completions", "rerank", "score", "embeddings")]
    for key in ("", f"\r\nAuthorization: Bearer {KEYS['gold']}x", "\r\nAuthorization: Bearer é"):
        assert {raw(served, f"{line} HTTP/1.1{key}")[0] for line in [*lines, "POST /v1/audio/transcriptions"]} == {401}
    for path in ("/health", "/liveness", "/ping", "/readiness", "/", "/page/info"):
        assert [raw(served, f"{method} {path} HTTP/1.1")[0] for method in ("GET", "HEAD")] == [200, 200]


def test_only_its_own_routes_are_served(served: Served) -> None:
    key = f"Authorization: Bearer {KEYS['gold']}"
    paths = ("/v1/../metrics", "/v1/%2e%2e/metrics", "/v1/models/../../workers", "/workers")
    for line in (*(f"GET {path}" for path in paths), "POST /v1/edits", "DELETE /v1/models", "POST /health"):
        found, answer = raw(served, f"{line} HTTP/1.1\r\n{key}")
        assert found == 404, (line, answer)
    assert [raw(served, f"{method} /v1/models HTTP/1.1\r\n{key}")[0] for method in ("GET", "HEAD")] == [200, 200]


def test_bodies_come_as_they_are(served: Served) -> None:
    key = f"Authorization: Bearer {KEYS['gold']}\r\nContent-Type: application/json"
    line = "POST /v1/chat/completions HTTP/1.1"
    body = json.dumps({"model": MODEL, "messages": CHAT, "max_tokens": 3}).encode()
    assert raw(served, f"{line}\r\n{key}\r\nContent-Encoding: gzip", gzip.compress(body))[0] == 415
    assert raw(served, f"{line}\r\n{key}", b"x" * ((1 << 20) + 1))[0] == 413
    assert raw(served, f"{line}\r\n{key}", body)[0] == 200


async def test_an_id_in_a_request_opens_nothing_with_anothers_key(served: Served, gold: openai.AsyncOpenAI) -> None:
    stream = await gold.chat.completions.create(
        model=MODEL, messages=CHAT, stream=True, max_tokens=300, extra_body={"ignore_eos": True}
    )
    chunks = [await anext(aiter(stream))]
    async with served.client(KEYS["iron"]) as iron:
        own = await iron.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=3, extra_body={"request_id": chunks[0].id}
        )
        assert own.choices[0].finish_reason == "length"
    chunks += [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_requests_are_their_keys_own(served: Served, gold: openai.AsyncOpenAI) -> None:
    """Their tenant is charged for them, and shares no cached prompts with another."""
    async with served.client(KEYS["iron"]) as iron:
        for client in (gold, iron):
            await client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=3)
    async with Admin(served.scheduler.admin_target, api_key=KEYS["admin"], tls=served.folder) as admin:
        async with asyncio.timeout(30):
            while len(finished := await admin.finished_requests(2)) < 2:
                pass
    assert [request.tenant for request in finished] == ["iron", "gold"]


async def test_what_a_tenant_has_stored_cached_and_streamed_is_out_of_anothers_reach(
    served: Served, gold: openai.AsyncOpenAI
) -> None:
    """Stored responses, cached prompts, streams that could be resumed, and the page."""
    stored = await gold.responses.create(model=MODEL, input="a secret of gold", store=True, max_output_tokens=16)
    async with served.client(KEYS["iron"]) as iron:
        for call in (iron.responses.retrieve, iron.responses.delete, iron.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="there is no stored response"):
                await call(stored.id)
        items: Any = [{"type": "item_reference", "id": stored.output[0].id}]
        for fields in ({"input": "and?", "previous_response_id": stored.id}, {"input": items}):
            with pytest.raises(openai.APIStatusError) as error:
                await iron.responses.create(model=MODEL, **fields)
            assert error.value.status_code in (400, 404)
        for client, salt, is_cached in ((gold, "a", False), (gold, "a", True), (iron, "a", False), (gold, "b", False)):
            found = await client.completions.create(
                model=MODEL, prompt="a prompt of many blocks " * 4, max_tokens=1, extra_body={"cache_salt": salt}
            )
            assert found.usage is not None
            assert found.usage.prompt_tokens_details is not None
            assert bool(found.usage.prompt_tokens_details.cached_tokens) is is_cached, (client, salt)
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 4, "stream": True}).encode()

    def post(name: str, last_id: str) -> tuple[int, bytes]:
        head = f"Authorization: Bearer {KEYS[name]}\r\nContent-Type: application/json\r\nLast-Event-ID: {last_id}"
        return raw(served, f"POST /v1/completions HTTP/1.1\r\n{head}", body)

    _, events = await asyncio.to_thread(post, "gold", "0")
    last_id = next(line for line in events.decode().splitlines() if line.startswith("id: "))[4:].strip()
    statuses = [(await asyncio.to_thread(post, name, last_id))[0] for name in ("gold", "iron")]
    assert statuses == [200, 409]
    for line in ("GET /page/feed", "POST /page/flush", "GET /page/adapters"):
        assert (await asyncio.to_thread(raw, served, f"{line} HTTP/1.1\r\nX-Api-Key: {KEYS['gold']}"))[0] == 403
    assert (await gold.responses.retrieve(stored.id)).output == stored.output


async def test_a_reader_and_a_writer_of_single_bytes_block_no_other_client(
    served: Served, gold: openai.AsyncOpenAI
) -> None:
    """One reads a byte of a long stream at a time, one sends its body so, while another client is served."""
    host, _, port = served.address.rpartition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Api-Key: {KEYS['iron']}\r\n"
    fields = {"model": MODEL, "prompt": "a", "stream": True, "ignore_eos": True}
    large = json.dumps(fields | {"max_tokens": 220, "n": 2, "logprobs": 20}).encode()
    small = json.dumps(fields | {"max_tokens": 2}).encode()

    async def opened(body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=served.context, limit=1)
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        return reader, writer

    slow, asks = await opened(large)
    asks.write(large)
    answered, writes = await opened(small)
    received = b""
    for number in range(len(small)):
        writes.write(small[number : number + 1])
        await writes.drain()
        received += await slow.read(1)
        if number % 10 == 0:
            found = await gold.completions.create(model=MODEL, prompt="a", max_tokens=2)
            assert found.choices
    assert received.startswith(b"HTTP/1.1 200 OK"), await slow.read()
    for reader, writer in ((answered, writes), (slow, asks)):
        assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()


async def test_a_client_that_leaves_frees_what_it_held(served: Served, gold: openai.AsyncOpenAI) -> None:
    """The worker is stopped while both requests run and their clients leave: it would be done in a second."""
    long = {"max_tokens": 400, "temperature": 0, "extra_body": {"ignore_eos": True}}
    worker_process, _ = served.scheduler.processes

    async def until_requests(number: int) -> ClusterState:
        async with asyncio.timeout(60):
            while (state := await served.state()).num_requests != number:
                pass
            return state

    before = (await until_requests(0)).num_output_tokens
    with halted(worker_process):
        asked = [
            asyncio.create_task(gold.chat.completions.create(model=MODEL, messages=CHAT, stream=streamed, **long))
            for streamed in (True, False)
        ]
        await until_requests(2)
        for task in asked:
            if not task.cancel():  # it has an answer's head already
                await (await task).close()
        await until_requests(0)
    async with asyncio.timeout(60):
        while any(map(is_busy, (state := await served.state()).workers)):
            pass
    assert state.num_output_tokens < before + 100  # of 800
    (worker,) = state.workers
    assert worker.num_free_device_blocks == worker.num_device_blocks


def test_plain_text_gets_no_answer(served: Served) -> None:
    with pytest.raises((urllib.error.URLError, ConnectionError, OSError)):
        urllib.request.urlopen(f"http://{served.address}/health", timeout=10)
