"""Forms that are made to take hours or all memory: refused in a moment, and no other request waits for longer."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil
import pytest
from cluster import cluster_state, front_ends

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import LocalServer, SamplingParams

DEADLINE = 20.0
"""Seconds. A bomb is refused in half a second. Without limits, most of these take more than 20, or do not end."""
MAX_BYTES = 256 << 20
"""Of memory that a front end and its processes gain. Without limits the first one takes gigabytes."""


def doubling(letter: str = "a") -> dict[str, Any]:
    """Every pattern doubles what it takes."""
    patterns = [{"pattern": f"[{letter}-z]*{number}[0-9]*"} for number in range(24)]
    return {"json_schema": json.dumps({"type": "string", "allOf": patterns})}


def rules(count: int) -> dict[str, Any]:
    chain = [f'r{number} ::= r{number + 1} "a" | r{number + 1}' for number in range(count)]
    return {"grammar": "\n".join([*chain, f'r{count} ::= "b"', "root ::= r0"])}


BOMBS: dict[str, dict[str, Any]] = {
    "a schema that doubles": doubling(),
    "blank lines before a rule": {"grammar": "\n" * 60_000 + 'root ::= "a"'},
    "a chain of rules": rules(2200),
    "all letters, again and again": {"regex": r"(?i)" + r"\p{L}" * 10_000},
    "nested counted repetitions": {"regex": "(a|aa|aaa){1,1000}" * 300},
}
TOO_SLOW = r"^sampling\.\w+ cannot be followed: it takes more than 0\.3 s of CPU time to compile$"


@pytest.fixture
async def stub(tiny_server: LocalServer) -> AsyncIterator[InferenceServiceStub]:
    """One connection, and so one front end."""
    async with grpc.aio.insecure_channel(tiny_server.target) as channel:
        yield InferenceServiceStub(channel)


async def text_of(stub: InferenceServiceStub, **sampling: Any) -> str:
    request = pb.GenerateRequest(text="a prompt", sampling=SamplingParams(**sampling))
    return "".join([message.text async for message in stub.Generate(request)])


async def refusal(stub: InferenceServiceStub, form: dict[str, Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await text_of(stub, max_tokens=5, **form)
    return error.value.code(), error.value.details() or ""


async def stream(stub: InferenceServiceStub) -> str:
    return await text_of(stub, max_tokens=200, ignore_eos=True, temperature=0)


def memory(server: LocalServer) -> int:
    """Bytes of the front end and of all processes that it has started."""
    (front_end,) = front_ends(server.target)
    processes: list[psutil.Process] = [front_end, *front_end.children(recursive=True)]
    return sum(process.memory_info().rss for process in processes)


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_is_refused_and_delays_no_other_request(
    tiny_server: LocalServer, stub: InferenceServiceStub, name: str
) -> None:
    expected = await stream(stub)
    before = await cluster_state(tiny_server.admin_target)
    async with asyncio.timeout(DEADLINE):
        (code, words), beside, small = await asyncio.gather(
            refusal(stub, BOMBS[name]), stream(stub), text_of(stub, max_tokens=20, regex=f"[a-z]{{9}}{len(name)}")
        )
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert re.match(TOO_SLOW, words), words
        assert beside == expected
        assert re.fullmatch(r"[a-z]{9}\d+", small)
        assert await refusal(stub, BOMBS[name]) == (code, words)
    assert (await cluster_state(tiny_server.admin_target)).num_losses == before.num_losses


async def test_a_schema_of_ten_mb_is_refused_by_its_size(stub: InferenceServiceStub) -> None:
    schema = json.dumps({"enum": ["x" * 1000] * 10_000})
    async with asyncio.timeout(DEADLINE):
        code, words = await refusal(stub, {"json_schema": schema})
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "bytes" in words


async def test_bombs_whose_clients_leave_keep_neither_memory_nor_the_forms_behind_them(
    tiny_server: LocalServer, stub: InferenceServiceStub
) -> None:
    await text_of(stub, max_tokens=20, choice=pb.Choice(options=["a", "b"]))
    before = memory(tiny_server)
    async with asyncio.timeout(DEADLINE):
        bombs = [asyncio.create_task(refusal(stub, doubling(letter))) for letter in "bcdefghijklm"]
        await asyncio.wait(bombs, return_when=asyncio.FIRST_COMPLETED)
        for bomb in bombs[2:]:
            bomb.cancel()
        schema = json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2})
        pair = json.loads(await text_of(stub, max_tokens=100, json_schema=schema, temperature=0, seed=1))
    assert [type(value) for value in pair] == [bool, bool]
    assert memory(tiny_server) - before < MAX_BYTES
    await asyncio.gather(*bombs, return_exceptions=True)


@pytest.mark.parametrize("number", [0, -1], ids=["the one that forks", "the one that compiles"])
async def test_forms_are_compiled_again_after_their_process_was_killed(
    tiny_server: LocalServer, stub: InferenceServiceStub, number: int
) -> None:
    await text_of(stub, max_tokens=20, regex="there is one[.!]")
    (front_end,) = front_ends(tiny_server.target)
    children = [child for child in front_end.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    compilers = [child for child in children if "scheduler_service.frontend.forms.form_compiler" in child.cmdline()]
    assert len(compilers) > 1
    compilers[number].kill()
    async with asyncio.timeout(DEADLINE):
        assert await text_of(stub, max_tokens=20, regex=f"killed {number}") == f"killed {number}"
