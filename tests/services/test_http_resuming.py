"""A stream over HTTP that broke goes on with the header Last-Event-ID as if it had not broken."""

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from chat_templates import TOOLS
from engines import OneProcess, running, until
from event_streams import Event, Repeated, summed
from fake_worker_service import FakeWorkerService, serving
from http_edge import http_edge
from http_requests import CHAT
from locked import KEYRING, KEYS
from responses_requests import joined

from pagewire_client import LocalServer

SECRET = "a secret of two schedulers"
STREAM: dict[str, Any] = {"stream": True, "temperature": 1.0}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
SAID: dict[str, Any] = STREAM | {"messages": CHAT, "max_tokens": 20}
CALLED = STREAM | {"messages": CHAT, "max_tokens": 80, "tools": TOOLS, "tool_choice": "required"}
ASKED = {
    "chat": ("/v1/chat/completions", SAID | {"logprobs": True, "top_logprobs": 1, "stream_options": USAGE}),
    "several": ("/v1/chat/completions", SAID | {"n": 3, "return_token_ids": True, "stream_options": USAGE}),
    "stop": ("/v1/chat/completions", SAID | {"n": 2, "stop": ["e", "a"], "max_tokens": 60}),
    "tools": ("/v1/chat/completions", CALLED),
    "completion": ("/v1/completions", STREAM | {"prompt": "hello", "n": 2, "echo": True, "max_tokens": 20}),
    "response": ("/v1/responses", STREAM | {"input": "hello", "max_output_tokens": 20}),
    "message": ("/v1/messages", SAID | {"model": "tiny-agent", "thinking": {"type": "enabled", "budget_tokens": 5}}),
}
CHAT_ROUTE = "/v1/chat/completions"


@pytest.mark.parametrize("name", ASKED)
async def test_events_before_and_after_a_break_are_those_of_an_unbroken_stream(
    agent_server: LocalServer, name: str
) -> None:
    request = Repeated(agent_server.http_url, *ASKED[name])
    whole = await request.events()
    assert len({event.id for event in whole}) == len(whole)
    for num_received in (1, 2, len(whole) // 2, len(whole) - 1):
        resumed = whole[:num_received] + await request.events(whole[num_received - 1].id)
        if name == "response":
            assert [event.data["sequence_number"] for event in resumed] == list(range(len(resumed)))
            assert items_of(resumed) == items_of(whole)
            assert response_of(resumed) == response_of(whole)
        else:
            assert summed(resumed) == summed(whole)


@pytest.mark.parametrize(("name", "has_ids"), [("chat", False), ("completion", False), ("response", True)])
async def test_events_of_one_line_stay_so_unless_ids_are_asked_for(
    agent_server: LocalServer, name: str, has_ids: bool
) -> None:
    events = await Repeated(agent_server.http_url, *ASKED[name]).events("")
    assert {bool(event.id) for event in events} == {has_ids}


def items_of(events: list[Event]) -> list[dict[str, Any]]:
    return joined(copy.deepcopy([event.data for event in events]))


def response_of(events: list[Event]) -> dict[str, Any]:
    response = events[-1].data["response"]
    return response | {"usage": response["usage"] | {"input_tokens_details": None}}


@asynccontextmanager
async def front_end(worker: FakeWorkerService, **settings: Any) -> AsyncIterator[tuple[OneProcess, str]]:
    """An engine and a front end of their own, and the URL."""
    async with (
        serving(worker) as address,
        running(address, resume_secret=SECRET, **settings) as one,
        http_edge(one.link) as url,
    ):
        yield one, url


async def test_another_scheduler_with_the_same_secret_resumes_the_stream(byte_tokenizer_directory: Path) -> None:
    body = {"prompt": "a", "stream": True, "max_tokens": 9}
    first, other = (FakeWorkerService(byte_tokenizer_directory) for _ in range(2))
    async with front_end(first) as (_, url), front_end(other) as (_, other_url):
        whole = await Repeated(url, "/v1/completions", body).events()
        resumed = await Repeated(other_url, "/v1/completions", body).events(whole[0].id)
        assert summed(whole[:1] + resumed) == summed(whole)


async def test_a_stream_that_is_not_the_same_again_ends_with_an_error(byte_tokenizer_directory: Path) -> None:
    body = {"prompt": "a", "stream": True, "max_tokens": 9}
    first, other = (FakeWorkerService(byte_tokenizer_directory) for _ in range(2))
    other.spoil = with_another_token
    async with front_end(first) as (_, url), front_end(other) as (_, other_url):
        whole = await Repeated(url, "/v1/completions", body).events()
        error, done = await Repeated(other_url, "/v1/completions", body).events(whole[0].id)
        assert "the server generates other tokens than the client has received" in error.data["error"]["message"]
        assert (error.id, done.id, done.data) == ("", "", "[DONE]")


def with_another_token(answer: Any) -> Any:
    answer.token_ids[:] = [token_id + 1 for token_id in answer.token_ids]
    return answer


async def test_an_id_is_for_its_own_request_and_tenant_alone(byte_tokenizer_directory: Path) -> None:
    gold, iron = ({"Authorization": f"Bearer {KEYS[name]}"} for name in ("gold", "iron"))
    body = {"prompt": "a", "stream": True, "max_tokens": 5}
    async with front_end(FakeWorkerService(byte_tokenizer_directory), keyring=KEYRING) as (one, url):
        event_id = (await Repeated(url, "/v1/completions", body, gold).events())[0].id
        for others in (
            Repeated(url, "/v1/completions", body | {"max_tokens": 6}, gold),
            Repeated(url, "/v1/completions", body, iron),
        ):
            status, message = await others.refusal(event_id)
            assert (status, "Last-Event-ID belongs to another request" in message) == (409, True)
        request = Repeated(url, "/v1/completions", body, gold)
        for spoilt in (f"{event_id[:-1]}{'A' if event_id[-1] != 'A' else 'Q'}", f"A{event_id[1:]}", event_id[4:]):
            assert (await request.refusal(spoilt))[0] in (400, 409)
        for no_id in ("1", "é", "AAAA", "="):
            status, message = await request.refusal(no_id)
            assert (status, message) == (400, "Last-Event-ID is no id of an event of this server")
        one.link.welcome.result().resume_secret = b"another"
        assert "was not signed by this server" in (await request.refusal(event_id))[1]


@pytest.mark.parametrize(
    ("route", "body", "reason"),
    [
        ("/v1/completions", {"prompt": "a"}, "Last-Event-ID is for streams; set stream: true"),
        ("/v1/completions", {"prompt": ["a", "b"], "stream": True}, "is not for a stream of several prompts"),
        ("/v1/completions", {"prompt": "a", "stream": True, "best_of": 2}, "is not for best_of and beam search"),
        ("/v1/completions", {"prompt": "a", "stream": True, "use_beam_search": True}, "is not for best_of and beam"),
        ("/v1/embeddings", {"input": "a"}, "/v1/embeddings has no streams that Last-Event-ID could resume"),
    ],
)
async def test_a_request_whose_stream_cannot_be_resumed_is_refused(
    tiny_server: LocalServer, route: str, body: dict[str, Any], reason: str
) -> None:
    status, message = await Repeated(tiny_server.http_url, route, body).refusal("0")
    assert (status, reason in message) == (400, True)


async def test_a_stream_that_a_stop_of_the_server_cuts_says_how_to_go_on(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    bodies = {
        CHAT_ROUTE: {"messages": CHAT, "stream": True},
        "/v1/completions": {"prompt": "a", "stream": True},
        "/v1/responses": {"input": "a", "stream": True},
        "/v1/messages": {"messages": CHAT, "stream": True, "max_tokens": 50, "model": "fake"},
    }
    async with front_end(worker) as (one, url):
        worker.runs.clear()
        streams = [asyncio.create_task(Repeated(url, *asked).events()) for asked in bodies.items()]
        states = one.link.requests.by_call
        await until(lambda: len(states) == len(one.requests.in_flight) == len(bodies))
        await until(lambda: all(call.group for call in one.requests.in_flight.values()))
        worker.stops_at = worker.num_steps + 4
        worker.runs.set()
        await until(lambda: all(sum(state.num_output_tokens) for state in states.values()))
        await one.engine.drain(0.0)
        for events in await asyncio.gather(*streams):
            error = next(event for event in events if event.retry)
            assert error.retry == "1000"
            assert "the server is shutting down; to resume the stream" in str(error.data)
            assert "Last-Event-ID" in str(error.data)
            assert not any(event.id for event in events[events.index(error) :])
