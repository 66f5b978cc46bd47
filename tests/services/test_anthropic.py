"""Anthropic's own client against /v1/messages. The client refuses every answer that is not of its types."""

import io
import json
from collections.abc import AsyncIterator, Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import aiohttp
import anthropic
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import ErrorResponse, Message, MessageParam, RawMessageStreamEvent
from http_edge import http_edge
from pydantic import TypeAdapter

from pagewire_client import LocalServer
from pagewire_common.calls.errors import RequestError
from scheduler_service.access.keys import ApiKey, Keyring, digest_of
from scheduler_service.access.refusals import Refusals
from scheduler_service.frontend.chat.events import EventLog
from scheduler_service.frontend.http.anthropic.blocks import Blocks, WholeBlock, add_to_whole
from scheduler_service.frontend.http.anthropic.history import read_messages
from scheduler_service.frontend.http.images.image_reader import ImageReader

MODEL = "tiny-agent"
USER: MessageParam = {"role": "user", "content": "hello"}
UNIT = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "f"]}, "days": {"type": "array", "items": {"enum": [12, True, "é"]}}},
    "required": ["unit", "days"],
}
TOOLS: list[Any] = [{"name": name, "input_schema": UNIT, "strict": True} for name in ("weather", "clock")]
GREEDY = {"temperature": 0}
BRIEFLY: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 3}}
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
Ask = Callable[..., Any]


@pytest.fixture
async def client(agent_server: LocalServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=agent_server.http_url, api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    ) as client:
        yield client


async def said(client: anthropic.AsyncAnthropic, **asked: Any) -> Message:
    """The answer, which is the same whole and streamed."""
    fields: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 24, "extra_body": GREEDY} | asked
    whole = await client.messages.create(**fields)
    async with client.messages.stream(**fields) as stream:
        types = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    assert (types[0], types[-1]) == ("message_start", "message_stop")
    assert types.count("content_block_start") == types.count("content_block_stop") == len(streamed.content)
    assert shown(whole) == shown(streamed)
    assert whole.usage.output_tokens == streamed.usage.output_tokens
    assert whole._request_id
    return whole


def shown(message: Message) -> dict[str, Any]:
    """A message without the names and counts that differ from answer to answer."""
    found = message.model_dump(exclude={"id", "usage"}, exclude_none=True)
    for block in found["content"]:
        block.pop("id", None)
    return found


def num_input_tokens(message: Message) -> int:
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


async def test_a_whole_loop_of_tools(client: anthropic.AsyncAnthropic) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "max_tokens": 200, "system": "Be brief."}
    first = await said(client, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **asked, **BRIEFLY)
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.name in ("weather", "clock")
    assert call.input["unit"] in ("c", "f")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    messages = [USER, first.to_param(), {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]
    answer = await said(client, messages=messages, tool_choice={"type": "none"}, **asked | {"max_tokens": 20})
    assert answer.stop_reason == "max_tokens"
    for choice, expected in (({"type": "auto"}, first), ({"type": "none"}, answer)):
        kept = {name: value for name, value in asked.items() if name != "max_tokens"} | {"tool_choice": choice}
        sent = [USER] if expected is first else messages
        counted = await client.messages.count_tokens(model=MODEL, messages=sent, **kept)
        assert counted.input_tokens == num_input_tokens(expected)


async def test_a_call_that_is_cut_has_what_was_written(client: anthropic.AsyncAnthropic) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "clock"}, **BRIEFLY}
    fields: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 200, "extra_body": GREEDY} | asked
    whole = await client.messages.create(**fields)
    assert [block.name for block in whole.content if block.type == "tool_use"] == ["clock"]
    inputs = []
    for most in range(whole.usage.output_tokens - 32, whole.usage.output_tokens, 11):
        cut = await said(client, max_tokens=most, **asked)
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", most)
        inputs += [block.input for block in cut.content if block.type == "tool_use"]
    assert inputs
    assert all(found.items() <= whole.content[-1].input.items() for found in inputs if not found.get("days"))


async def test_thinking_is_limited_hidden_or_off(client: anthropic.AsyncAnthropic) -> None:
    free = await said(client)
    assert [block.type for block in free.content] == ["thinking"]
    brief = await said(client, **BRIEFLY)
    assert [block.type for block in brief.content] == ["thinking", "text"]
    assert brief.usage.output_tokens_details is not None
    assert brief.usage.output_tokens_details.thinking_tokens < 10
    hidden = await said(client, thinking=BRIEFLY["thinking"] | {"display": "omitted"})
    assert hidden.content[0].type == "thinking"
    assert (hidden.content[0].thinking, hidden.content[1:]) == ("", brief.content[1:])
    off = await said(client, thinking={"type": "disabled"})
    assert [block.type for block in off.content] == ["text"]
    assert num_input_tokens(off) > num_input_tokens(free)  # the template closes the thinking
    assert shown(await said(client, thinking={"type": "adaptive"})) == shown(free)
    kept = await said(client, messages=[USER, brief.to_param(), USER], **BRIEFLY)
    without = [block.model_dump() for block in brief.content if block.type == "text"]
    assert num_input_tokens(kept) > num_input_tokens(
        await said(client, messages=[USER, {"role": "assistant", "content": without}, USER], **BRIEFLY)
    )


async def test_an_answer_ends_by_its_length_its_stop_or_the_context(client: anthropic.AsyncAnthropic) -> None:
    off: dict[str, Any] = {"thinking": {"type": "disabled"}}
    (block,) = (await said(client, **off)).content
    stop = block.text[10:12]
    ended = await said(client, stop_sequences=["no such text", stop], **off)
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in ended.content) == block.text[: block.text.index(stop)]
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "schema": schema}, "effort": "high"}
    formed = await said(client, output_config=form, **BRIEFLY)
    assert formed.stop_reason == "end_turn"
    assert json.loads(formed.content[-1].text) == {"a": 1}
    long: list[Any] = [{"role": "user", "content": "a" * 2000}]
    assert (await said(client, messages=long, max_tokens=10**6)).stop_reason == "model_context_window_exceeded"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"extra_body": {"container": "x"}}, "container is not supported here"),
        ({"extra_body": {"messages": [USER | {"name": "x"}]}}, r"messages\[0\].name is no field"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]}, "'web_search_20250305'"),
        ({"tools": [TOOLS[0] | {"input_examples": [{}]}]}, "tools.0.input_examples is not supported"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is any, and there are no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'"),
        ({"thinking": {"type": "enabled"}}, "thinking has budget_tokens if"),
        ({"output_config": {"effort": "low"}}, "output_config.effort is low"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"extra_body": {"top_p": 2}}, "top_p is 2"),
        ({"messages": [USER, {"role": "assistant", "content": []}]}, "last message has no content"),
    ],
)
async def test_what_cannot_be_obeyed_is_refused_by_its_name(
    client: anthropic.AsyncAnthropic, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words) as refused:
        await said(client, **asked)
    body = ErrorResponse.model_validate(refused.value.body)
    assert (body.error.type, body.request_id) == ("invalid_request_error", refused.value.request_id)


async def test_errors_before_the_route_have_the_same_form(
    client: anthropic.AsyncAnthropic, agent_server: LocalServer
) -> None:
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'x'; this server has tiny-agent"):
        await said(client, model="x")
    for headers, status in (({"Content-Type": "text/plain"}, 415), ({"Content-Type": "application/json"}, 413)):
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{agent_server.http_url}/v1/messages", data=io.BytesIO(b" " * (8 << 20))) as answer,
        ):
            found = await answer.json()
            assert (answer.status, found["type"], found["request_id"]) == (
                status,
                "error",
                answer.headers["Request-Id"],
            )
    keyring = Keyring([ApiKey(id="a", digest=digest_of("good"), tenant="t")])
    link: Any = SimpleNamespace(keyring=keyring, refusals=Refusals())
    async with http_edge(link) as url:
        for key, error in (("bad", anthropic.AuthenticationError), ("good", anthropic.NotFoundError)):
            for name in ("api_key", "auth_token"):
                async with anthropic.AsyncAnthropic(base_url=url, max_retries=0, **{name: key}) as other:  # type: ignore[arg-type]
                    with pytest.raises(error) as refused:
                        await other.post("/v1/messages/batches", cast_to=object, body={})
                    ErrorResponse.model_validate(refused.value.body)


async def test_messages_become_those_that_chat_templates_know() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "d", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "e"},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"unit": "c"}},
                {"type": "tool_use", "id": "2", "name": "clock", "input": {}, **cached},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "f"},
                {
                    "type": "tool_result",
                    "tool_use_id": "2",
                    "content": [{"type": "text", "text": "g"}],
                    "is_error": True,
                },
                {"type": "tool_result", "tool_use_id": "3"},
                {"type": "text", "text": "h"},
            ],
        },
    ]

    def call(number: str, name: str, arguments: Any) -> dict[str, Any]:
        return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert await read_messages([{"type": "text", "text": "s", **cached}], messages, ImageReader()) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb\nc"},
        {
            "role": "assistant",
            "content": "e",
            "reasoning_content": "d",
            "tool_calls": [call("1", "weather", {"unit": "c"}), call("2", "clock", {})],
        },
        {"role": "tool", "content": "f", "tool_call_id": "1", "name": "weather"},
        {"role": "tool", "content": "Error: g", "tool_call_id": "2", "name": "clock"},
        {"role": "tool", "content": "", "tool_call_id": "3"},
        {"role": "user", "content": "h"},
    ]
    for kind in ("image", "document", "search_result", "server_tool_use", "tool_use", None, 3):
        for content in ([{"type": kind}], [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": kind}]}]):
            with pytest.raises(RequestError, match=r"messages\[0\].content\[0\].*type is"):
                await read_messages(None, [{"role": "user", "content": content}], ImageReader())


def test_a_whole_message_is_the_sum_of_its_events_however_they_are_cut() -> None:
    draw = Random(1)
    for number in range(300):
        log, blocks, whole, snapshot, buffers = (
            EventLog(),
            Blocks("ab" * 16),
            list[WholeBlock](),
            Message.construct(content=[]),
            {},
        )
        for _ in range(draw.randint(1, 12)):
            match draw.randrange(4):
                case 0:
                    log.reasoning(draw.choice("abé"))
                case 1:
                    log.content(draw.choice("abé"))
                case 2:
                    log.start_call("weather", draw.choice([None, "id"]))
                    text = json.dumps({"a": [1, {"b": 'c\\"é'}], "d": None, "e": 12})
                    text = text[: draw.randint(0, len(text))] if draw.random() < 0.5 else text
                    for at in range(0, len(text), step := draw.randint(1, 9)):
                        log.arguments(text[at : at + step])
                        if draw.random() < 0.3:
                            _add(blocks.add(log.take()), whole, snapshot, buffers)
                    log.end_call()
                case _:
                    _add(blocks.add(log.take()), whole, snapshot, buffers)
        _add(blocks.add(log.take()) + blocks.end(), whole, snapshot, buffers)
        found = [json.loads(block.json()) for block in whole]
        assert found == [block.model_dump(exclude_unset=True) for block in snapshot.content], number


def _add(events: list[dict[str, Any]], whole: list[WholeBlock], snapshot: Any, buffers: dict[int, bytes]) -> None:
    add_to_whole(whole, events)
    for event in events:
        accumulate_event(
            event=EVENT.validate_python(event),
            current_snapshot=snapshot,
            json_bufs=buffers,
            output_format=anthropic.NOT_GIVEN,  # type: ignore[arg-type]
        )
