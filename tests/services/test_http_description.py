"""The description at /openapi.json is true: of every route, of its body, and of its answers."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from http_tables import body_of
from jsonschema import Draft202012Validator

from pagewire_client import LocalServer
from scheduler_service.frontend.http.routes import ROUTES, find_route
from scheduler_service.frontend.http.served.description import OPERATIONS

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
ASKED: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": CHAT,
    "POST /v1/chat/completions/batch": CHAT | {"messages": [CHAT["messages"]] * 2},
    "POST /v1/completions": {"prompt": "hello", "max_tokens": 3},
    "POST /v1/responses": {"input": "hello", "max_output_tokens": 16, "store": True},
    "POST /v1/embeddings": {"input": ["hello", "you"]},
    "POST /v2/embed": {"texts": ["hello"], "embedding_types": ["float", "base64"]},
    "POST /pooling": {"input": "hello", "task": "token_embed"},
    "POST /v1/rerank": {"query": "hello", "documents": ["you", "me"]},
    "POST /v1/score": {"text_1": "hello", "text_2": ["you", "me"]},
    "POST /tokenize": {"prompt": "hello"},
    "POST /detokenize": {"tokens": [70, 71]},
    "POST /v1/messages": {"model": "tiny-llama", **CHAT},
    "POST /v1/messages/count_tokens": {"model": "tiny-llama", "messages": CHAT["messages"]},
    "POST /api/chat": {
        "model": "tiny-llama",
        "messages": CHAT["messages"],
        "stream": False,
        "options": {"num_predict": 3},
    },
    "POST /api/generate": {"model": "tiny-llama", "prompt": "a", "stream": False, "options": {"num_predict": 3}},
    "POST /api/embed": {"model": "tiny-llama", "input": "hello"},
    "POST /api/show": {"model": "tiny-llama"},
}


@pytest.fixture
async def session(tiny_server: LocalServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(tiny_server.http_url) as session:
        yield session


async def described(session: aiohttp.ClientSession) -> dict[str, Any]:
    async with session.get("/openapi.json") as answer:
        found: dict[str, Any] = await answer.json()
        return found


def schema_of(description: dict[str, Any], part: dict[str, Any]) -> Draft202012Validator:
    schema = part["content"]["application/json"]["schema"]
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator({**schema, "components": description["components"]})


def test_every_route_is_described_with_the_body_that_it_reads() -> None:
    for name, route in ROUTES.items():
        if name != "GET /metrics":
            assert OPERATIONS[name].body is body_of(route), name
    for name in OPERATIONS.keys() - ROUTES.keys():
        method, _, path = name.partition(" ")
        assert find_route(method, path.replace("{", "").replace("}", "")) is not None
    assert len({operation.name for operation in OPERATIONS.values()}) == len(OPERATIONS)


async def test_bodies_answers_and_errors_are_as_described(session: aiohttp.ClientSession) -> None:
    description = await described(session)
    for name, operation in OPERATIONS.items():
        method, _, path = name.partition(" ")
        of_route = description["paths"][path][method.lower()]
        if operation.body is None:
            continue
        asked = schema_of(description, of_route["requestBody"])
        if (body := ASKED.get(name)) is not None:
            asked.validate(body)
            async with session.post(path, json=body) as answer:
                assert answer.status == 200, (name, await answer.text())
                schema_of(description, of_route["responses"]["200"]).validate(await answer.json())
        wrong = {**(body or {}), "no_such_field": 1}
        assert not asked.is_valid(wrong)
        async with session.post(path, json=wrong) as answer:
            assert answer.status == 400
            schema_of(description, of_route["responses"]["default"]).validate(await answer.json())


async def test_answers_of_routes_without_a_body_are_as_described(session: aiohttp.ClientSession) -> None:
    description = await described(session)
    async with session.post("/v1/responses", json=ASKED["POST /v1/responses"]) as answer:
        response_id = (await answer.json())["id"]
    names = [name for name in OPERATIONS if not name.startswith("POST")]
    for name in sorted(names, reverse=True):  # the response is deleted last
        method, _, path = name.partition(" ")
        url = path.replace("{response_id}", response_id).replace("{model}", "tiny-llama")
        async with session.request(method, url) as answer:
            assert answer.status == 200, name
            of_answer = description["paths"][path][method.lower()]["responses"]["200"]
            schema_of(description, of_answer).validate(await answer.json())


async def test_metrics_are_those_of_the_engine(session: aiohttp.ClientSession) -> None:
    async with session.get("/metrics") as answer:
        assert answer.content_type == "text/plain"
        text = await answer.text()
    assert "# TYPE pagewire_num_requests_running gauge" in text
    assert "process_resident_memory_bytes" in text
