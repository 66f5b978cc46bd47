"""What a client of the HTTP API is told that does not get what it asked for: a status, on chats and completions.

The scheduler's own reasons are its own tests' affair.
"""

import asyncio
import hashlib
import io
import json
import signal
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from cluster import halted
from http_requests import CHAT, MODEL
from tiny_adapters import write_three

from pagewire_client import LocalServer
from pagewire_client.admin import Admin
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.http.errors import HttpError, image_places, refused_by

KEYS: dict[str, dict[str, Any]] = {
    "all": {"admin": True},
    "no model": {"models": ["another"]},
    "no adapter": {"adapters": ["two"]},
    "two calls": {"requests_per_minute": 2},
    "one at a time": {"concurrency": 1},
}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/completions": {"prompt": "hello"},
}
each_route = pytest.mark.parametrize("route", ROUTES)


@pytest.fixture(scope="module")
def server(tiny_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("errors")
    lines = []
    for name, fields in KEYS.items():
        values = {
            "id": name.replace(" ", "-"),
            "sha256": hashlib.sha256(name.encode()).hexdigest(),
            "tenant": "",
        } | fields
        lines += ["[[key]]", *(f"{field} = {json.dumps(value)}" for field, value in values.items())]
    (folder / "keys.toml").write_text("\n".join(lines))
    with LocalServer(
        str(tiny_model_directory),
        worker_arguments=[
            *("--num-gpu-blocks-override", "64", "--block-size", "8", "--threads", "1", "--swap-space", "0"),
            *("--max-loras", "2"),
        ],
        scheduler_arguments=[
            *("--api-keys", str(folder / "keys.toml"), "--lora-dir", str(write_three(folder / "adapters"))),
            *("--no-worker-timeout", "0.5", "--max-num-requests", "8", "--receive-timeout", "3"),
        ],
    ) as server:
        yield server


@pytest.fixture(scope="module")
def url(server: LocalServer) -> str:
    return server.http_url


async def status(url: str, route: str, key: str = "all", headers: dict[str, str] | None = None, **more: Any) -> int:
    """Of a request with these fields besides what its route needs; an error has the form of OpenAI's API."""
    fields = {"model": MODEL, "max_tokens": 3} | ROUTES[route] | more
    return await status_of(url, route, json.dumps(fields).encode(), key, headers or {})


async def status_of(url: str, route: str, body: Any, key: str = "all", headers: dict[str, str] | None = None) -> int:
    shown = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"} | (headers or {})
    data = io.BytesIO(body) if isinstance(body, bytes) else body
    async with aiohttp.ClientSession() as session, session.post(url + route, data=data, headers=shown) as answer:
        found = json.loads(await answer.read())
        assert (answer.status == 200) == ("error" not in found), found
        if answer.status != 200:
            assert found["error"]["message"]
            assert found["error"].keys() == {"message", "type", "param", "code"}
        assert ("Retry-After" in answer.headers) == (answer.status in (429, 503))
        return answer.status


@each_route
async def test_what_is_asked_for_rightly_is_200(url: str, route: str) -> None:
    assert await status(url, route) == 200
    assert await status(url, route, "no adapter", model="two") == 200


@each_route
async def test_what_is_wrong_in_a_body_is_400(url: str, route: str) -> None:
    for wrong in ({"temperature": -1}, {"top_p": 2}, {"n": 1000}, {"max_tokens": "many"}, {"stop": ["x"] * 17}):
        assert await status(url, route, **wrong) == 400, wrong
    for unknown in ({"model": 3}, {"rid": "mine"}, {"min_token": 5}):
        assert await status(url, route, **unknown) == 400, unknown
    for body in (b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff\xfe"):
        assert await status_of(url, route, body) == 400, body[:3]


@each_route
async def test_a_prompt_that_is_too_long_is_400(url: str, route: str) -> None:
    long = (
        {"prompt": "x" * 600} if "prompt" in ROUTES[route] else {"messages": [{"role": "user", "content": "x" * 600}]}
    )
    assert await status(url, route, **long) == 400


@each_route
async def test_a_key_opens_only_its_own_models_and_adapters(url: str, route: str) -> None:
    assert await status(url, route, "another") == 401
    assert await status(url, route, "no model") == 403
    assert await status(url, route, "no adapter", model="one") == 403
    assert await status(url, route, model="another") == 404


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/api/show", "/v1/responses"])
async def test_a_key_learns_of_no_adapter_that_it_may_not_name(url: str, path: str) -> None:
    fields: dict[str, dict[str, Any]] = {
        "/tokenize": {"prompt": "a"},
        "/v1/messages/count_tokens": {"messages": CHAT},
        "/v1/responses": {"input": "a"},
    }
    headers = {"Authorization": "Bearer no adapter"}
    said = set()
    async with aiohttp.ClientSession(url, headers=headers) as session:
        for name in ("one", "zzz"):
            async with session.post(path, json=fields.get(path, {}) | {"model": name}) as answer:
                said.add((answer.status, (await answer.text()).partition(repr(name))[0].partition("request_id")[0]))
    assert len(said) == 1
    assert {status for status, _ in said} == {403}


@each_route
async def test_a_body_that_does_not_come_in_time_is_408(url: str, route: str) -> None:
    async def slowly() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    assert await status_of(url, route, slowly()) == 408


@each_route
async def test_a_body_that_is_too_large_or_not_json_is_413_or_415(url: str, route: str) -> None:
    assert await status(url, route, user="x" * (1 << 20)) == 413
    assert await status(url, route, headers={"Content-Encoding": "gzip"}) == 415
    assert await status(url, route, headers={"Content-Type": "text/plain"}) == 415
    assert await status(url, route, headers={"Content-Type": "application/json; charset=utf-8"}) == 200


async def test_calls_beyond_a_rate_are_429(url: str) -> None:
    assert [await status(url, route, "two calls") for route in (*ROUTES, *ROUTES)] == [200, 200, 429, 429]


@each_route
async def test_calls_beyond_a_keys_concurrency_are_429(url: str, server: LocalServer, route: str) -> None:
    """The worker is halted meanwhile, so that the first is not through before the second comes."""
    worker, _ = server.processes
    async with Admin(server.admin_target, api_key="all") as admin:

        async def until_requests(number: int) -> None:
            while (await admin.state()).state.num_requests != number:
                pass

        await until_requests(0)
        with halted(worker):
            held = asyncio.create_task(status(url, route, "one at a time"))
            await until_requests(1)
            assert await status(url, route, "one at a time") == 429
        assert await held == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_without_a_worker_it_is_503(url: str, server: LocalServer, stream: bool) -> None:
    """Last of all, since the worker does not come back."""
    worker, _ = server.processes
    worker.process.send_signal(signal.SIGKILL)
    async with Admin(server.admin_target, api_key="all") as admin:
        while any(worker.connected for worker in (await admin.state()).state.workers):
            pass
    assert [await status(url, route, stream=stream) for route in ROUTES] == [503, 503]
    async with aiohttp.ClientSession() as session:
        for path, expected in (("/health", 200), ("/readiness", 503)):
            async with session.get(url + path) as answer:
                assert answer.status == expected


@pytest.mark.parametrize("kind", ["image", "sound"])
def test_an_error_about_an_item_of_a_chat_names_it_as_the_body_does(kind: str) -> None:
    name, place = f"chat.messages[0].parts[1].{kind}", "messages[3].content[2].data"

    def refused() -> HttpError:
        image_places.set({name: place})
        return refused_by(RequestError(grpc.StatusCode.INVALID_ARGUMENT, f"{name} is too long"))

    error = copy_context().run(refused)
    assert (str(error), error.body["error"]["param"]) == (f"{place} is too long", "messages")
