"""Requests over HTTP that were made to do harm: each gets a right status and a sentence without anything of the inside,
and all processes that a request goes through stay as they were."""

import asyncio
import io
import json
import random
from collections import Counter
from typing import Any

import aiohttp
import pytest
from cluster import until_idle
from hostile_requests import INSIDE, Draw, changed
from test_hostile import GROWTH, memory

from pagewire_client import LocalServer

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/audio/transcriptions": {},
}
JSON = "application/json"
REFUSED = {400, 404, 408, 413, 415, 422, 501}
"""A mistake of the client's, or a route that this model does not serve."""
VALUES: list[Any] = [
    *(None, True, -1, 0, 2**63, 2**64, 10**30, 1e308, "", "x" * 5000, "\0", "\ud800", [], {}, [[]], {"": {}}),
    *([None] * 100, ["a"] * 5000, [2**40], {"$ref": "file:///etc/passwd"}, "<|im_end|>", "{{ ''.__class__ }}"),
]


def nested(draw: Draw) -> str:
    depth = draw.choice([100, 5000, 100_000])
    return draw.choice(['{"a":' * depth, "[" * depth, "[" * depth + "]" * depth])


def broken(draw: Draw) -> str:
    return draw.choice(
        ["", "{", "null", "[]", '"x"', "{'a': 1}", '{"a": NaN}', '{"a": ' + "9" * 10_000 + "}", "\ufeff{}"]
    )


def mistyped(draw: Draw, route: str) -> str:
    """A right body in which a field, or one that might be meant, has another value."""
    fields = dict(ROUTES[route])
    more = ("model", "stream", "n", "temperature", "max_tokens", "stop", "logprobs", "logit_bias", "response_format")
    more = (*more, "tools", "tool_choice", "seed", "user", "stream_options", "messages", "prompt", "input")
    more = (*more, "documents", "query", "tokens", "x")
    for _ in range(draw.randrange(1, 4)):
        fields[draw.choice([*fields, *more])] = draw.choice(VALUES)
    return json.dumps(fields)


def body_of(draw: Draw, route: str) -> bytes:
    text = draw.choice([nested, broken, mistyped, mistyped, mistyped])
    made = text(draw, route) if text is mistyped else text(draw)  # type: ignore[operator]
    data = str(made).encode(errors="surrogatepass")
    return changed(draw, data) if draw.random() < 0.3 else data


async def send(session: aiohttp.ClientSession, url: str, draw: Draw, found: Counter[tuple[str, int]]) -> None:
    route = draw.choice([*ROUTES])
    data, right = body_of(draw, route), REFUSED | {200}
    headers = {"Content-Type": draw.choice([JSON, JSON, JSON, JSON, "text/plain", "multipart/form-data", "x" * 1000])}
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
    tiny_server: LocalServer, request: pytest.FixtureRequest
) -> None:
    number = 10_000 if request.config.getoption("--soak") else 200
    draw, found = random.Random(3), Counter[tuple[str, int]]()
    url = tiny_server.http_url
    async with aiohttp.ClientSession() as session:
        before = memory(tiny_server)
        for sent in range(0, number, 10):
            await asyncio.gather(*(send(session, url, draw, found) for _ in range(10)))
            if sent == number // 10:
                before = memory(tiny_server)
        async with session.post(url + "/v1/completions", json=ROUTES["/v1/completions"]) as answer:
            assert answer.status == 200
    (worker,) = (await until_idle(tiny_server.admin_target)).workers
    assert worker.num_free_device_blocks == worker.num_device_blocks
    assert not worker.num_losses
    after = memory(tiny_server)
    assert before.keys() == after.keys()
    assert max(after[process] - before[process] for process in before) < GROWTH
    assert {status for _, status in found} >= {400, 413, 415}
