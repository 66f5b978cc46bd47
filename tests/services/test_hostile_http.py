"""Requests over HTTP that were made to do harm: each gets a right status and a sentence without anything of the inside,
and all processes that a request goes through stay as they were."""

import asyncio
import io
import json
import random
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from functools import reduce
from typing import Any

import aiohttp
import pytest
from cluster import until_idle
from hostile_requests import INSIDE, Draw, changed
from http_bodies import TABLE, bodies
from test_hostile import GROWTH, memory

from pagewire_client import LocalServer

SOUNDS = "/v1/audio/transcriptions"
ROUTES: dict[str, list[dict[str, Any]]] = {route: [*bodies(route)] for route in TABLE} | {SOUNDS: [{}]}
JSON = "application/json"
NAMES = sorted({name for bodies in ROUTES.values() for body in bodies for name in body} | {"model", "stream", "x"})
REFUSED = {400, 404, 408, 413, 415, 422, 501}
"""A mistake of the client's, or a route that this model does not serve."""
VALUES: list[Any] = [
    *(None, True, -1, 0, 0.5, 2**31, 2**63, 2**64, 10**30, 1e308, 10**400, "", "x" * 5000, "\0", "\ud800", "NaN", "0"),
    *([], {}, [[]], {"": {}}, [None] * 100, ["a"] * 5000, [2**40], [{}], {"a": [{"b": None}]}, {"type": "x"}, -1e-308),
    *({"$ref": "file:///etc/passwd"}, "<|im_end|>", "{{ ''.__class__ }}", "é🌍\u202e", "1e999", "true", " ", "a\nb"),
]


def places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every object and list in a body, but for the deepest, with each of its keys."""
    if isinstance(value, dict | list) and depth < 20:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from places(inner, depth + 1)


def nested(draw: Draw) -> str:
    depth = draw.choice([100, 5000, 100_000])
    return draw.choice(['{"a":' * depth, "[" * depth, "[" * depth + "]" * depth])


def broken(draw: Draw) -> str:
    return draw.choice(
        ["", "{", "null", "[]", '"x"', "{'a': 1}", '{"a": NaN}', '{"a": ' + "9" * 10_000 + "}", "\ufeff{}"]
    )


def mistyped(draw: Draw, route: str) -> str:
    """A right body in which values at any depth, or fields of other bodies, are odd, nested deeply, doubled or away."""
    fields = deepcopy(draw.choice(ROUTES[route]))
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        holder, key = draw.choice([*places(fields), *((fields, name) for name in draw.sample(NAMES, 3))])
        roll, value = draw.random(), deepcopy(draw.choice(VALUES))
        if roll < 0.05 and key in fields:
            del fields[key]
        elif roll < 0.1:
            holder[key] = reduce(lambda inner, _: [inner], range(draw.choice([60, 200, 700])), value)
        else:
            holder[key] = value
    text = json.dumps(fields)
    if draw.random() < 0.05:  # keys twice
        text = text.removesuffix("}") + f", {text.removeprefix('{')}"
    return text.replace('"NaN"', "NaN") if draw.random() < 0.2 else text


def body_of(draw: Draw, route: str) -> bytes:
    text = draw.choice([nested, broken, *[mistyped] * 8])
    made = text(draw, route) if text is mistyped else text(draw)  # type: ignore[operator]
    data = str(made).encode(errors="surrogatepass")
    return changed(draw, data) if draw.random() < 0.1 else data


async def send(session: aiohttp.ClientSession, url: str, draw: Draw, found: Counter[tuple[str, int]]) -> None:
    route = draw.choice([*ROUTES])
    data, right = body_of(draw, route), REFUSED | {200}
    headers = {"Content-Type": draw.choice([*[JSON] * 20, "text/plain", "multipart/form-data", "x" * 1000])}
    if (roll := draw.random()) < 0.05:
        headers["X-Large"] = "x" * draw.choice([10_000, 100_000])
        right = {400}
    elif roll < 0.1:
        headers["Content-Encoding"] = draw.choice(["gzip", "br", "x"])
    elif roll < 0.15:
        data = b"x" * (3 << 20)
    asked = session.post(url + route, data=io.BytesIO(data), headers=headers)
    try:
        async with asyncio.timeout(30), asked as answer:
            status, text = answer.status, await answer.text(errors="replace")
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):  # closed while it was sent, past a limit
        assert len(data) > 1 << 20 or "X-Large" in headers, (route, data[:200])
        return
    found[route, status] += 1
    assert status in right, (route, status, text[:300], headers, data[:300])
    if status != 200:
        assert not INSIDE.search(text), (route, text[:300], data[:300])


@pytest.mark.timeout(1800)
async def test_what_is_meant_to_do_harm_over_http_gets_a_right_status_and_nothing_else(
    agent_server: LocalServer, request: pytest.FixtureRequest
) -> None:
    number = 10_000 if request.config.getoption("--soak") else 200
    draw, found = random.Random(3), Counter[tuple[str, int]]()
    url = agent_server.http_url
    async with aiohttp.ClientSession() as session:
        before = memory(agent_server)
        for sent in range(0, number, 10):
            await asyncio.gather(*(send(session, url, draw, found) for _ in range(10)))
            if sent == number // 10:
                before = memory(agent_server)
        async with session.post(url + "/v1/completions", json=ROUTES["/v1/completions"][0]) as answer:
            assert answer.status == 200
    (worker,) = (await until_idle(agent_server.admin_target)).workers
    assert worker.num_free_device_blocks == worker.num_device_blocks
    assert not worker.num_losses
    after = memory(agent_server)
    assert before.keys() == after.keys()
    assert max(after[process] - before[process] for process in before) < GROWTH
    assert {status for _, status in found} >= {400, 413, 415}
    print(f"\n{dict(sorted(found.items()))}; MiB grown: {[(after[one] - before[one]) >> 20 for one in after]}")  # noqa: T201
