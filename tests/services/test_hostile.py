"""Requests that were made to do harm: each gets a right status and a sentence without anything of the inside.

The list is that of attacks on servers like this one, and messages whose bytes were changed at random. Real services,
with keys and two front ends. `make soak` sends 10,000; `make test` some hundreds of the same.
"""

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from cluster import front_ends
from locked import KEYS, key_file

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.admin import Admin
from pagewire_client.channel import key_metadata
from pagewire_client.llm import collect

Code = grpc.StatusCode
GENERATE = "/pagewire.v1.InferenceService/Generate"
METHODS = (
    GENERATE,
    *(f"/pagewire.v1.InferenceService/{name}" for name in ("Abort", "GetModel", "Tokenize", "Detokenize")),
)
GOLD = key_metadata(KEYS["gold"])
INSIDE = re.compile(r"Traceback|\.py\b|/work|/tmp|/home|site-packages|object at 0x|\bself\b|Error:|Exception")
GROWTH = 64 << 20
"""Bytes that a front end may have more at the end than after the first tenth: what its allocator keeps of large
requests."""

PACE = 10
"""Requests a second, of which a soak sends a tenth before it sends as many as it can."""

NAN, INFINITY = float("nan"), float("inf")
Draw = random.Random
REFUSED = {Code.INVALID_ARGUMENT}
FINE = {Code.OK, Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED}


def sampling(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="a", sampling=SamplingParams(**{"max_tokens": 3} | fields))


def floats(draw: Draw) -> pb.GenerateRequest:
    name = draw.choice(["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
    return sampling(**{name: draw.choice([NAN, INFINITY, -INFINITY, -1e30, 1e30])})


def crowds(draw: Draw) -> pb.GenerateRequest:
    return sampling(**{draw.choice(["n", "best_of", "beam_width"]): draw.choice([129, 10**6, 2**32 - 1])})


def lists(draw: Draw) -> pb.GenerateRequest:
    many = draw.choice([2000, 5000])
    return draw.choice(
        [
            lambda: sampling(stop=["x"] * many),
            lambda: sampling(bad_words=["x"] * many),
            lambda: sampling(stop_token_ids=range(many)),
            lambda: sampling(logit_bias=dict.fromkeys(range(many), 1.0)),
            lambda: pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x")] * many)),
        ]
    )()


def prompts(draw: Draw) -> pb.GenerateRequest:
    return draw.choice(
        [
            lambda: pb.GenerateRequest(),
            lambda: pb.GenerateRequest(text=""),
            lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1])),
            lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 100_000)),
            lambda: pb.GenerateRequest(text="x" * 900_000),
            lambda: pb.GenerateRequest(text="a", priority=draw.choice([-(2**31), 2**31 - 1])),
            lambda: pb.GenerateRequest(text="a", lora_name="../../etc/passwd"),
            lambda: pb.GenerateRequest(text="a", cache_salt="x" * 100_000),
            lambda: pb.GenerateRequest(text="a", request_id="x" * 10_000),
        ]
    )()


def texts(draw: Draw) -> pb.GenerateRequest:
    """What is only text, however it looks."""
    text = draw.choice(["<|im_end|>" * 500, "\0" * 100, "\u202e" * 200, "{{ ''.__class__ }}", "' OR 1=1", "é" * 400])
    if draw.random() < 0.5:
        return sampling() if not text else pb.GenerateRequest(text=text[:400], sampling=SamplingParams(max_tokens=2))
    chat = pb.Chat(messages=[pb.ChatMessage(role=draw.choice(["user", text[:50]]), content=text[:200])])
    return pb.GenerateRequest(chat=chat, sampling=SamplingParams(max_tokens=2))


def forms(draw: Draw) -> pb.GenerateRequest:
    return draw.choice(
        [
            lambda: sampling(json_schema='{"items":' * draw.randrange(200, 2000)),
            lambda: sampling(json_schema=json.dumps({"enum": ["x" * 70_000]})),
            lambda: sampling(json_schema='{"$ref": "http://169.254.169.254/"}'),
            lambda: sampling(regex="(" * draw.randrange(1, 5000)),
            lambda: sampling(regex="(a{1,1000}){1,1000}{1,1000}{1,1000}"),
            lambda: sampling(grammar="start: " + "(" * draw.randrange(1, 2000)),
            lambda: sampling(choice=pb.Choice(options=["a"] * 5000)),
        ]
    )()


def resumptions(draw: Draw) -> pb.GenerateRequest:
    request = sampling()
    request.resume.SetInParent()
    for _ in range(draw.randrange(3)):
        request.resume.outputs.add(index=draw.choice([0, 1, 2**32 - 1]), token_ids=[draw.randrange(2**32)])
    request.resume.num_prompt_logprobs = draw.choice([0, 1, 2**32 - 1])
    return request


def spoofs(draw: Draw) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="a", tenant=draw.choice(["iron", "", "gold/../iron", "x" * 500]))


KINDS: dict[Callable[[Draw], pb.GenerateRequest], set[grpc.StatusCode]] = {
    floats: REFUSED,
    crowds: REFUSED,
    lists: REFUSED,
    prompts: REFUSED | {Code.NOT_FOUND},
    texts: FINE,
    forms: FINE,
    resumptions: FINE | {Code.FAILED_PRECONDITION},
    spoofs: {Code.OK, Code.PERMISSION_DENIED, Code.INVALID_ARGUMENT},
}


def changed(draw: Draw, data: bytes) -> bytes:
    """Bytes that are cut, doubled, or not what they were."""
    array = bytearray(data)
    for _ in range(draw.randrange(1, 8)):
        place = draw.randrange(len(array) + 1)
        match draw.randrange(4):
            case 0:
                array[place:place] = draw.randbytes(draw.randrange(1, 20))
            case 1:
                del array[place : place + draw.randrange(1, 10)]
            case 2 if place < len(array):
                array[place] ^= 1 << draw.randrange(8)
            case _:
                array += array[:place]
    return bytes(array[: 64 << 10])


ANY = FINE | {
    *(Code.UNIMPLEMENTED, Code.PERMISSION_DENIED, Code.FAILED_PRECONDITION, Code.ALREADY_EXISTS),
}


@pytest.fixture(scope="module")
def locked_server(tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    keys = key_file(tmp_path_factory.mktemp("keys") / "keys.toml", "gold", "iron", "admin")
    with LocalServer(
        str(tiny_model_directory),
        worker_arguments=[
            *("--num-device-blocks", "64", "--block-size", "8", "--threads", "1", "--swap-space", "0", "--forms"),
        ],
        scheduler_arguments=["--api-keys", str(keys), "--frontends", "2", "--check-invariants"],
    ) as server:
        yield server


async def send(channel: grpc.aio.Channel, draw: Draw, found: Counter[tuple[str, str]]) -> None:
    """One request, of which the status must be right."""
    kind = draw.choice([*KINDS, None, None])
    method, metadata, timeout = GENERATE, GOLD, 30.0
    if kind is None:
        method = draw.choice(METHODS)
        data, right, name = changed(draw, draw.choice(list(KINDS))(draw).SerializeToString()), ANY, "changed bytes"
    else:
        data, right, name = kind(draw).SerializeToString(), KINDS[kind], kind.__name__
    if (roll := draw.random()) < 0.1:
        metadata = draw.choice(
            [None, key_metadata("wrong"), (("authorization", "Bearer "),), (*(GOLD or ()), *(GOLD or ()))]
        )
        right, name = {Code.UNAUTHENTICATED}, "no key"
    elif roll < 0.2:
        timeout, right = draw.random() / 50, right | {Code.DEADLINE_EXCEEDED}
    call: Any = channel.unary_stream(method)(data, metadata=metadata, timeout=timeout)
    leaves = draw.random() < 0.1
    try:
        async for _ in call:
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
    """Of the engine and the front ends, by process id."""
    scheduler = server.processes[1].process.pid
    processes = [psutil.Process(scheduler), *front_ends(server.target)]
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
                await send(channel, draw, found)
                if sent >= number / 10:
                    has_begun.set()

        async def attack_at_a_pace() -> None:
            """As many a second as a network might let through, so that the clients' own work is not all there is."""
            nonlocal sent
            async with asyncio.TaskGroup() as group:
                for place in range(number // 10):
                    group.create_task(send(channels[place % len(channels)], draw, found))
                    sent += 1
                    await asyncio.sleep(1 / PACE)

        async def stand_by_all_along(times: list[float]) -> None:
            while not is_over:
                await stand_by(times)

        channels = [
            grpc.aio.insecure_channel(
                locked_server.target,
                options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)],
            )
            for _ in range(8)
        ]
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
        for channel in channels:
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
        print(f"\n{dict(found)}\nMiB grown: {grown}; {bystander}")  # noqa: T201
    assert max(grown.values()) < GROWTH / 2**20
