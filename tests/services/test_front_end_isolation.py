"""What clients do to one front end costs the streams of another nothing."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from cluster import connected_to_each, front_ends, num_connections, until_idle

from bench.fleet.http2 import Connection
from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.admin import Admin, Sample
from pagewire_client.llm import collect

SHORT = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
SLOW_WORD = "x" * 22
"""Tens of milliseconds for the expression below, which tries every way to cut it."""
PANIC_WORD = "x" * 30
"""Too many ways: the library of the expression gives up, and the tokenizer panics."""
NUM_READERS = 300

Streams = Callable[[], Awaitable[None]]


@pytest.fixture(scope="module")
def server(tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Two front ends, with a tokenizer that takes exponential time to look for x before y."""
    directory = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(tiny_model_directory, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tokenizer["pre_tokenizer"]]}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    with LocalServer(
        str(directory),
        worker_arguments=[
            "--num-gpu-blocks-override",
            "4096",
            "--block-size",
            "8",
            "--threads",
            "1",
            "--swap-space",
            "0",
        ],
        scheduler_arguments=["--frontends", "2", "--max-num-requests", "2000", "--check-invariants"],
    ) as server:
        yield server


def request(text: str = "a prompt", **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=SHORT, **fields)


@asynccontextmanager
async def two_front_ends(server: LocalServer) -> AsyncIterator[tuple[int, InferenceServiceStub, Streams]]:
    """One to trouble, by its process id, with a connection to it; and what runs streams through the other one.

    They are as they always are.
    """
    async with Client(server.target) as client:
        tokens = (await collect(client, "a prompt", SHORT)).outputs[0].token_ids
    async with connected_to_each(server.target) as stubs:
        (pid, troubled), (_, other) = stubs.items()

        async def run_streams_beside() -> None:
            for _ in range(3):
                gained = [token_id async for message in other.Generate(request()) for token_id in message.token_ids]
                assert gained == tokens

        yield pid, troubled, run_streams_beside


async def test_a_tokenizer_that_loops(server: LocalServer) -> None:
    async with two_front_ends(server) as (pid, troubled, run_streams_beside):
        looping = [asyncio.create_task(troubled.Generate(request(f"{SLOW_WORD} " * 20)).code()) for _ in range(200)]
        async with asyncio.timeout(60):
            await run_streams_beside()
        assert not all(call.done() for call in looping)
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()  # it would go on for minutes
        assert grpc.StatusCode.UNAVAILABLE in await asyncio.gather(*looping)


async def test_a_tokenizer_that_panics_fails_its_request_alone(server: LocalServer) -> None:
    async with two_front_ends(server) as (_, troubled, run_streams_beside):
        assert await troubled.Generate(request(PANIC_WORD)).code() is grpc.StatusCode.INTERNAL
        await run_streams_beside()
        tokens = [token_id async for message in troubled.Generate(request()) for token_id in message.token_ids]
        assert len(tokens) == 100


async def test_a_prompt_of_16_mb(server: LocalServer) -> None:
    async with two_front_ends(server) as (_, troubled, run_streams_beside):
        large = [troubled.Generate(request("word " * 3_300_000)) for _ in range(4)]
        await run_streams_beside()
        refused = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert {await call.code() for call in large} <= refused


async def test_hundreds_of_clients_that_do_not_read(server: LocalServer) -> None:
    few = SamplingParams(max_tokens=10, ignore_eos=True)
    async with (
        two_front_ends(server) as (troubled, _, run_streams_beside),
        unread_connection(troubled, server.target) as connection,
    ):
        for _ in range(NUM_READERS):
            connection.begin(pb.GenerateRequest(text="a prompt", sampling=few).SerializeToString())
        async with Admin(server.admin_target) as admin, aclosing(admin.watch(0.1)) as samples:
            async for sample in samples:
                if isinstance(sample, Sample) and sample.state.num_requests >= NUM_READERS:
                    break
        await run_streams_beside()
        assert connection.num_messages == 0
        assert troubled in {process.pid for process in front_ends(server.target)}
    assert (await until_idle(server.admin_target)).num_waiting == 0


@asynccontextmanager
async def unread_connection(front_end: int, target: str) -> AsyncIterator[Connection]:
    """A connection to the front end of this process id; it lets no call send anything."""
    host, _, port = target.rpartition(":")
    async with AsyncExitStack() as connected, asyncio.timeout(60):
        while True:
            before = {process.pid: num_connections(process) for process in front_ends(target)}
            transport, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection("/pagewire.v1.InferenceService/Generate", lambda *_: None, lambda _: None, window=0),
                host,
                int(port),
            )
            connected.callback(transport.abort)
            taken_by: set[int] = set()
            while not taken_by:
                await asyncio.sleep(0.01)
                taken_by = {p.pid for p in front_ends(target) if num_connections(p) > before.get(p.pid, 0)}
            if front_end in taken_by:
                break
        yield connection
