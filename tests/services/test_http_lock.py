"""OpenAI's API behind keys and TLS: the gateway between the two ends of our own."""

import asyncio
import contextlib
import gzip
import json
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import openai
import psutil
import pytest
import trustme
from certificates import fill
from cluster import halted, is_busy
from locked import KEYS, code_of, key_file
from ports import free_address
from serve_command import serve_command

from pagewire.v1.admin_service_pb2 import ClusterState
from pagewire_client import LocalServer
from pagewire_client.admin import Admin
from pagewire_client.http.edge import Edge
from pagewire_common.connection.tls import TlsFolder

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "tiny-llama"


@dataclass
class Served:
    address: str
    scheduler: LocalServer
    folder: Path
    keys: Path
    process: "subprocess.Popen[str]"

    @property
    def context(self) -> ssl.SSLContext:
        return TlsFolder(self.folder).client_context()

    def client(self, key: str) -> openai.AsyncOpenAI:
        http = openai.DefaultAsyncHttpxClient(verify=self.context)
        return openai.AsyncOpenAI(base_url=f"https://{self.address}/v1", api_key=key, max_retries=0, http_client=http)

    async def state(self) -> ClusterState:
        async with Admin(self.scheduler.admin_target, api_key=KEYS["admin"], tls=self.folder) as admin:
            return (await admin.state()).state


@pytest.fixture(scope="module")
def served(tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = fill(tmp_path_factory.mktemp("tls"), trustme.CA(), "localhost", "127.0.0.1")
    keys = key_file(tmp_path_factory.mktemp("keys") / "keys.toml", *KEYS)
    with LocalServer(
        str(tiny_model_directory),
        worker_arguments=[
            "--num-gpu-blocks-override",
            "128",
            "--block-size",
            "8",
            "--threads",
            "1",
            "--swap-space",
            "0",
        ],
        scheduler_arguments=["--tls", str(folder), "--api-keys", str(keys), "--check-invariants"],
    ) as scheduler:
        options = ("--tls", str(folder), "--http-tls", str(folder))
        with serve_command(scheduler.target, *options, PAGEWIRE_CLIENT_API_KEY=KEYS["admin"]) as serving:
            yield Served(serving.address, scheduler, folder, keys, serving.process)


@pytest.fixture
async def gold(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served.client(KEYS["gold"]) as client:
        yield client


async def test_a_key_opens_the_api_whole_and_streamed(gold: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in gold.models.list()] == [MODEL]
    words = {"temperature": 0, "max_tokens": 20}
    whole = await gold.chat.completions.create(model=MODEL, messages=CHAT, **words)
    stream = await gold.chat.completions.create(model=MODEL, messages=CHAT, stream=True, **words)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 5


async def test_calls_that_go_around_the_gateway_have_the_same_lock(served: Served, gold: openai.AsyncOpenAI) -> None:
    found = await gold.embeddings.create(model=MODEL, input=["one", "two"])
    assert len(found.data) == 2
    async with served.client("a wrong key") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.embeddings.create(model=MODEL, input=["one", "two"])
    for path in ("completions", "rerank", "score", "embeddings", "audio/transcriptions"):
        assert raw(served, f"POST /v1/{path} HTTP/1.1", b"{}")[0] == 401


async def test_what_an_echo_needs_is_not_asked_for_a_key_that_is_used_up(served: Served) -> None:
    async with served.client(KEYS["two"]) as client:
        found = await client.completions.create(model=MODEL, prompt=[5, 6], echo=True, logprobs=1, max_tokens=1)
        assert found.choices[0].logprobs.tokens[0]
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model=MODEL, prompt=["a"] * 250, echo=True, logprobs=1)


async def test_the_gateway_is_not_told_where_the_scheduler_is() -> None:
    """It would tell its clients."""
    address = free_address()
    edge = Edge(address, MODEL)
    await edge.start()
    try:
        async with grpc.aio.insecure_channel(edge.target) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await channel.unary_unary("/vllm.grpc.engine.VllmEngine/HealthCheck")(b"")
    finally:
        await edge.close()
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert error.value.details() == "the scheduler cannot be reached, or takes no requests now"


@pytest.mark.parametrize("key", ["a wrong key", KEYS["gold"] + "x", "\u00e9"])
async def test_another_key_is_a_401(served: Served, key: str) -> None:
    if not key.isascii():
        key = key.encode().decode("latin-1")
    async with served.client(key) as client:
        with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
            await client.chat.completions.create(model=MODEL, messages=CHAT)
        if key.isascii():
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


def status(served: Served, path: str, **headers: str) -> int:
    request = urllib.request.Request(f"https://{served.address}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, context=served.context, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_every_route_is_closed_but_health(served: Served) -> None:
    paths = ["/v1/models", "/v1/responses", "/workers", "/", "/metrics", "/get_loads", "/v1/../workers", "/flush_cache"]
    assert {status(served, path) for path in paths} == {401}
    assert [status(served, path) for path in ("/health", "/readiness")] == [200, 200]


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


def test_of_the_gateways_routes_only_those_pass_that_end_at_the_scheduler(served: Served) -> None:
    """/v1/responses would call whatever server a request names."""
    key = f"Authorization: Bearer {KEYS['gold']}"
    for line in (
        "POST /v1/responses",
        "POST /v1/messages",
        "GET /v1/../engine_metrics",
        "GET /v1/%2e%2e/engine_metrics",
        "GET /v1/models/../../workers",
        "DELETE /v1/models",
        "GET /workers",
        "POST /health",
        "OPTIONS /v1/models",
    ):
        found, answer = raw(served, f"{line} HTTP/1.1\r\n{key}")
        assert found == 404, (line, answer)
    assert raw(served, f"GET /v1/models HTTP/1.1\r\n{key}")[0] == 200


def test_bodies_come_as_they_are_and_answers_say_nothing_of_the_inside(served: Served) -> None:
    key = f"Authorization: Bearer {KEYS['gold']}\r\nContent-Type: application/json"
    line = "POST /v1/chat/completions HTTP/1.1"
    body = json.dumps({"model": MODEL, "messages": CHAT, "max_tokens": 3}).encode()
    assert raw(served, f"{line}\r\n{key}\r\nContent-Encoding: gzip", gzip.compress(body))[0] == 415
    assert raw(served, f"{line}\r\n{key}", b"x" * ((1 << 20) + 1))[0] == 413
    found, answer = raw(served, f"{line}\r\n{key}", body)
    assert found == 200
    assert b"x-smg" not in answer.lower()
    assert b"grpc://" not in answer


async def test_an_id_in_a_request_opens_nothing_with_anothers_key(served: Served, gold: openai.AsyncOpenAI) -> None:
    """The gateway would take a `rid` of the body for the request's id, and shows ids in its answers."""
    stream = await gold.chat.completions.create(
        model=MODEL, messages=CHAT, stream=True, max_tokens=300, extra_body={"ignore_eos": True}
    )
    chunks = [await anext(aiter(stream))]
    async with served.client(KEYS["iron"]) as iron:
        for stolen in (chunks[0].id, f"{chunks[0].id[:32]}-x"):
            own = await iron.chat.completions.create(
                model=MODEL, messages=CHAT, max_tokens=3, extra_body={"rid": stolen}
            )
            assert own.id not in (stolen, chunks[0].id)
    chunks += [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_the_gateways_own_port_has_no_key_for_other_processes(served: Served) -> None:
    serving = psutil.Process(served.process.pid)
    ports = {one.laddr.port for one in serving.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    ports.discard(int(served.address.rpartition(":")[2]))
    (port,) = ports
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in (
            "/pagewire.v1.InferenceService/Generate",
            "/pagewire.v1.InferenceService/Abort",
            "/vllm.grpc.engine.VllmEngine/Generate",
            "/vllm.grpc.engine.VllmEngine/Abort",
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        ):
            assert await code_of(channel, method, None) is grpc.StatusCode.UNIMPLEMENTED


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


def test_without_a_key_of_its_own_the_gateway_is_not_started(served: Served) -> None:
    command = ["serve", "--target", served.scheduler.target, "--listen", free_address(), "--tls", str(served.folder)]
    result = subprocess.run(
        [sys.executable, "-m", "pagewire_client", *command], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1
    assert "UNAUTHENTICATED: an API key is needed" in result.stderr
