"""Requests that were made to do harm: each gets a right status and a sentence without anything of the inside.

Real services, with keys and two front ends. `make soak` sends 10,000; `make test` some hundreds of the same.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from cluster import front_ends
from hostile_requests import FINE, INSIDE, KINDS, OTHERS, Code, Draw, changed, texts_in
from locked import KEYS, key_file

from bench.systems.processes import engine_process
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.admin import Admin
from pagewire_client.channel import key_metadata
from pagewire_client.llm import collect

GOLD, ADMIN = key_metadata(KEYS["gold"]), key_metadata(KEYS["admin"])
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))
GROWTH = 64 << 20
"""Bytes that a front end may have more at the end than after the first tenth: what its allocator keeps of large
requests."""

MAX_SLOWER = 3.0
"""Times that a bystander's median may be longer beside requests at a pace than alone, measured in the same run."""

PACE = 10
"""Requests a second, of which a soak sends a tenth before it sends as many as it can."""

ANY = FINE | {
    *(Code.UNIMPLEMENTED, Code.PERMISSION_DENIED, Code.FAILED_PRECONDITION, Code.ALREADY_EXISTS, Code.NOT_FOUND),
}


@pytest.fixture(scope="module")
def locked_server(tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    keys = key_file(tmp_path_factory.mktemp("keys") / "keys.toml", "gold", "iron", "admin")
    with LocalServer(
        str(tiny_model_directory),
        worker_arguments=[
            *("--num-gpu-blocks-override", "64", "--block-size", "8", "--threads", "1", "--swap-space", "0", "--forms"),
        ],
        scheduler_arguments=["--api-keys", str(keys), "--frontends", "2", "--check-invariants"],
    ) as server:
        yield server


async def send(
    channel: grpc.aio.Channel, operators: grpc.aio.Channel, draw: Draw, found: Counter[tuple[str, str]]
) -> None:
    """One request, of which the status must be right."""
    kind = draw.choice(KINDS)
    metadata, timeout = ADMIN if kind.is_operators else GOLD, 30.0
    method, data, right = kind.method, kind.make(draw).SerializeToString(), kind.right
    name = f"{method.rpartition('/')[2]} {kind.make.__name__}"
    if draw.random() < 0.2:
        method = method if kind.is_operators else draw.choice([method, *OTHERS])
        data, right, name = changed(draw, data), ANY, f"{method.rpartition('/')[2]} changed bytes"
    if (roll := draw.random()) < 0.1 and not kind.is_open:
        metadata = draw.choice(
            [None, key_metadata("wrong"), (("authorization", "Bearer "),), (*(GOLD or ()), *(GOLD or ()))]
        )
        right, name = frozenset({Code.UNAUTHENTICATED}), "no key"
    elif roll < 0.13 and kind.is_operators:
        metadata, right, name = GOLD, frozenset({Code.PERMISSION_DENIED}), "no operator's key"
    elif roll < 0.16:
        metadata = (*(metadata or ()), ("x-large", "x" * draw.choice([20_000, 200_000])))
        right, name = frozenset({Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE}), "large metadata"
    elif roll < 0.25:
        timeout, right = draw.random() / 50, right | {Code.DEADLINE_EXCEEDED}
    to = operators if kind.is_operators else channel
    call: Any = to.unary_stream(method)(data, metadata=metadata, timeout=timeout)  # whatever kind of method it is
    leaves = draw.random() < 0.1 or method.endswith(("/Watch", "/WatchClusterState"))
    try:
        async for answer in call:
            assert not INSIDE.search(texts_in(answer)) or right is ANY, (name, answer[:300])
            if leaves:
                call.cancel()
                found[name, "left"] += 1
                return
        code, details = await call.code(), ""
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details() or ""
    found[name, code.name] += 1
    assert code in right, (name, code, details, data[:200])
    assert not INSIDE.search(details), (name, details)


def memory(server: LocalServer) -> dict[int, int]:
    """Of the worker, the engine and the front ends, by process id."""
    worker, scheduler = (one.process.pid for one in server.processes)
    processes = [psutil.Process(worker), engine_process(scheduler), *front_ends(server.target)]
    return {process.pid: process.memory_info().rss for process in processes}


@pytest.mark.timeout(1800)
async def test_what_is_meant_to_do_harm_gets_a_right_status_and_nothing_else(
    locked_server: LocalServer, request: pytest.FixtureRequest
) -> None:
    soaks = request.config.getoption("--soak")
    number = 10_000 if soaks else 200
    draw, found = random.Random(1), Counter[tuple[str, str]]()
    plain = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    async with Client(locked_server.target, api_key=KEYS["iron"], retry_for=0) as client:
        await client.wait_until_serving(60)
        expected = (await collect(client, "a bystander", plain)).outputs[0].token_ids
        alone: list[float] = []
        paced: list[float] = []
        beside: list[float] = []

        async def stand_by(times: list[float]) -> None:
            began = time.perf_counter()
            assert (await collect(client, "a bystander", plain)).outputs[0].token_ids == expected
            times.append(time.perf_counter() - began)

        for _ in range(number // 20 if soaks else 0):
            await stand_by(alone)
        sent, is_over, has_begun = 0, False, asyncio.Event()

        async def attack(channel: grpc.aio.Channel) -> None:
            nonlocal sent
            while sent < number:
                sent += 1
                await send(channel, operators, draw, found)
                if sent >= number / 10:
                    has_begun.set()

        async def attack_at_a_pace() -> None:
            """As many a second as a network might let through, so that the clients' own work is not all there is."""
            nonlocal sent
            async with asyncio.TaskGroup() as group:
                for place in range(number // 10):
                    group.create_task(send(channels[place % len(channels)], operators, draw, found))
                    sent += 1
                    await asyncio.sleep(1 / PACE)

        async def stand_by_all_along(times: list[float]) -> None:
            while not is_over:
                await stand_by(times)

        channels = [grpc.aio.insecure_channel(locked_server.target, options=OPTIONS) for _ in range(8)]
        operators = grpc.aio.insecure_channel(locked_server.admin_target, options=OPTIONS)
        if soaks:
            standing = asyncio.create_task(stand_by_all_along(paced))
            await attack_at_a_pace()
            is_over = True
            await standing
            is_over = False
        standing = asyncio.create_task(stand_by_all_along(beside))
        attacks = [asyncio.create_task(attack(channel)) for channel in channels]
        beginning = asyncio.create_task(has_begun.wait())
        await asyncio.wait([beginning, *attacks], return_when=asyncio.FIRST_COMPLETED)
        before = memory(locked_server)
        await asyncio.gather(*attacks)
        is_over = True
        await standing
        for channel in (*channels, operators):
            await channel.close()
    async with Admin(locked_server.admin_target, api_key=KEYS["admin"]) as admin, asyncio.timeout(60):
        while (state := (await admin.state()).state).num_requests:
            pass
    (worker,) = state.workers
    assert worker.num_free_device_blocks == worker.num_device_blocks
    assert not worker.num_losses
    after = memory(locked_server)
    assert before.keys() == after.keys()
    grown = {process: (after[process] - before[process]) / 2**20 for process in before}
    if soaks:
        median = [sorted(times)[len(times) // 2] for times in (alone, paced, beside)]
        bystander = f"a bystander's median {median[0]:.3f} s alone, {median[1]:.3f} s beside {PACE} requests a second, "
        bystander += f"{median[2]:.3f} s beside as many as the machine takes"
        assert median[1] < MAX_SLOWER * median[0], bystander
        print(f"\n{dict(found)}\nMiB grown: {grown}; {bystander}")  # noqa: T201
    assert max(grown.values()) < GROWTH / 2**20
