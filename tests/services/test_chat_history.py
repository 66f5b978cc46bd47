"""Messages as agents send them back become the chat that transformers renders from the same messages in plain form."""

import asyncio
import json
import time
from typing import Any

import pytest
from chat_templates import HERMES, TEMPLATES, call, loop_of_tools
from rendered_chats import expected, shown

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.http.chats.json_values import MAX_ID_BYTES, json_text
from scheduler_service.frontend.http.images.image_reader import ImageReader
from scheduler_service.frontend.http.openai.history import read_history
from scheduler_service.frontend.rendering.chat_input import ChatInput

USER = {"role": "user", "content": "Weather in Paris?"}
SAID = {"role": "assistant", "content": "", "tool_calls": [call("weather", {"city": "Paris"})]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}


async def history(messages: Any) -> pb.Chat:
    return await read_history(messages, lambda word: word in HERMES, ImageReader())


async def text_of(source: str, messages: Any) -> str:
    chat = await history(messages)
    return shown(source, ChatInput([(each.role, each.content, each.fields) for each in chat.messages]))


def without(message: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != name}


ARGUMENTS: Any = '{"city": "Paris"}'
FORMS: dict[str, list[dict[str, Any]]] = {
    "plain": [USER, SAID, RESULT],
    "content null": [USER, SAID | {"content": None}, RESULT],
    "content absent": [USER, without(SAID, "content"), RESULT],
    "content of no parts": [USER, SAID | {"content": []}, RESULT],
    "arguments as text": [USER, SAID | {"tool_calls": [call("weather", ARGUMENTS)]}, RESULT],
    "a call without type, with an index": [
        USER,
        SAID | {"tool_calls": [{**without(call("weather", ARGUMENTS), "type"), "index": 0}]},
        RESULT,
    ],
    "parts": [
        USER | {"content": [{"type": "text", "text": "Weather in Paris?"}]},
        SAID | {"content": [{"type": "text", "text": ""}]},
        RESULT | {"content": [{"type": "text", "text": "sunny"}]},
    ],
    "as the official client dumps a message": [
        USER,
        SAID | {"content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None},
        RESULT,
    ],
    "as the official client parses a message": [
        USER,
        SAID
        | {
            "parsed": None,
            "tool_calls": [
                {**made, "function": made["function"] | {"parsed_arguments": {"city": "Paris"}}}
                for made in [call("weather", ARGUMENTS)]
            ],
        },
        RESULT,
    ],
}


@pytest.mark.parametrize("form", FORMS)
async def test_every_form_of_a_second_turn_is_the_same_chat(form: str) -> None:
    for source in TEMPLATES.values():
        assert await text_of(source, FORMS[form]) == expected(source, FORMS["plain"])


@pytest.mark.parametrize("arguments", ["", None, {}, "{}"])
async def test_a_call_may_have_no_arguments(arguments: Any) -> None:
    messages = [USER, SAID | {"tool_calls": [call("now", arguments)]}, RESULT]
    plain = [USER, SAID | {"tool_calls": [call("now", {})]}, RESULT]
    for source in TEMPLATES.values():
        assert await text_of(source, messages) == expected(source, plain)
    messages[1]["tool_calls"][0]["function"].pop("arguments")
    assert await text_of(HERMES, messages) == expected(HERMES, plain)


async def test_loops_of_tools_with_ids_of_any_form_are_rendered() -> None:
    for number in ("0", "chatcmpl-tool-é🌍", "functions.weather:0", "x" * MAX_ID_BYTES, " "):
        messages = loop_of_tools('{"city": "Paris"}')
        plain = loop_of_tools({"city": "Paris"})
        for message in (*messages, *plain):
            for each in message.get("tool_calls", ()):
                each["id"] = number
            if "tool_call_id" in message:
                message["tool_call_id"] = number
        for source in TEMPLATES.values():
            assert await text_of(source, messages) == expected(source, plain)


async def test_parts_are_paragraphs_and_a_refusal_is_a_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}, {"type": "output_text", "text": "c"}]
    chat = await history([{"role": "assistant", "content": parts, "refusal": "d"}, {"role": "assistant"}])
    assert [message.content for message in chat.messages] == ["a\nb\nc\nd", ""]
    assert not any(message.fields for message in chat.messages)


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content",), ("reasoning_content", "reasoning")])
async def test_reasoning_is_given_back_under_either_name(names: tuple[str, ...]) -> None:
    messages = [USER, {"role": "assistant", "content": "Blue.", **dict.fromkeys(names, "looked")}]
    plain = [USER, {"role": "assistant", "content": "Blue.", "reasoning_content": "looked"}]
    assert await text_of(HERMES, messages) == expected(HERMES, plain)


async def test_a_field_that_the_template_names_reaches_it_and_any_other_is_refused() -> None:
    chat = await read_history([USER | {"mood": {"x": [1]}}], lambda word: word == "mood", ImageReader())
    assert json.loads(chat.messages[0].fields) == {"mood": {"x": [1]}}
    assert not (await history([USER | {"mood": None}])).messages[0].fields


PART = [{"type": "image_url", "image_url": {"url": "x"}}]
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]
REFUSED: list[tuple[Any, str]] = [
    ({}, "messages must be a list"),
    ([USER] * 4097, "messages has 4097 entries; at most 4096"),
    ([USER, 1], r"messages\[1\] is 1; it must be an object"),
    ([{"content": "a"}], r"messages\[0\].role is missing; it must be one of system, developer"),
    ([{"role": "function", "content": "a"}], r"messages\[0\].role is 'function'"),
    ([{"role": ["user"], "content": "a"}], r"messages\[0\].role is a list"),
    ([{"role": "user"}], r"messages\[0\].content is missing"),
    ([{"role": "user", "content": 3}], r"messages\[0\].content is 3; it must be a text"),
    ([{"role": "user", "content": PART}], r"content\[0\].type is 'image_url', and this model reads text alone"),
    ([{"role": "user", "content": ["a"]}], r"messages\[0\].content\[0\] is 'a'; it must be an object"),
    ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text is missing; it must be a text"),
    ([{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}], r"content\[0\].b is no field"),
    ([{"role": "user", "content": "\ud800"}], r"messages\[0\].content has one half of a surrogate pair"),
    ([USER | {"name": "x" * 513}], r"messages\[0\].name has 513 bytes; at most 512"),
    ([USER | {"name": 1}], r"messages\[0\].name is 1; it must be a text"),
    ([USER | {"mood": 1}], r"messages\[0\].mood is no field of messages"),
    ([USER | {"k" * 1_000_000: 1}], r"messages\[0\].k{64} is no field"),
    ([USER | {"\ud800": 1}], r"messages\[0\].\? is no field"),
    ([USER | {"tool_calls": []}], r"messages\[0\].tool_calls is for messages of the assistant"),
    ([USER | {"reasoning": "a"}], r"messages\[0\].reasoning is for messages of the assistant"),
    ([SAID | {"function_call": {"name": "a"}}], r"messages\[0\].function_call is the old form of tool calls"),
    ([SAID | {"audio": {"id": "a"}}], r"messages\[0\].audio is set, and sounds of the assistant are not read here"),
    ([SAID | {"tool_calls": {}}], r"messages\[0\].tool_calls must be a list"),
    ([SAID | {"tool_calls": [None]}], r"tool_calls\[0\] is missing; it must be an object"),
    ([SAID | {"tool_calls": [call("a", {}) | {"type": "custom"}]}], r"tool_calls\[0\].type is 'custom'"),
    ([SAID | {"tool_calls": [{"id": "1"}]}], r"tool_calls\[0\].function is missing"),
    ([SAID | {"tool_calls": [call("a", 1)]}], r"tool_calls\[0\].function.arguments is 1; it must be an object"),
    ([SAID | {"tool_calls": [call("a", [])]}], r"tool_calls\[0\].function.arguments is a list"),
    ([SAID | {"tool_calls": [call("a", {"x": float("nan")})]}], r"messages\[0\] is not valid JSON"),
    ([SAID | {"tool_calls": [call("a", {"x": "\udc00"})]}], r"messages\[0\] has one half of a surrogate pair"),
    ([SAID | {"tool_calls": [call("a", {"x": DEEP})]}], r"messages\[0\] is nested too deeply"),
    ([RESULT | {"tool_call_id": 7}], r"messages\[0\].tool_call_id is 7"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
async def test_what_cannot_be_obeyed_is_refused_by_its_place(number: int) -> None:
    messages, reason = REFUSED[number]
    with pytest.raises(RequestError, match=reason) as error:
        await history(messages)
    assert len(str(error.value).encode()) < 300


async def test_other_text_of_arguments_is_refused_when_the_chat_is_read() -> None:
    for arguments, reason in (('{"city": "Par', "is not valid JSON"), ("3", "is 3; it must be an object")):
        with pytest.raises(ValueError, match=rf"^chat.messages\[0\].tool_calls\[0\].function.arguments {reason}"):
            await text_of(HERMES, [SAID | {"tool_calls": [call("a", arguments)]}])


async def test_a_long_history_leaves_the_event_loop_free() -> None:
    reading = asyncio.create_task(history(loop_of_tools({"city": "Paris"}) * 400))
    turns, begin = 0, time.monotonic()
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 50
    assert time.monotonic() - begin < 10
    assert len((await reading).messages) == 3600


def test_values_are_written_as_json_again() -> None:
    assert json_text("tools", [{"é": "\u2028"}]) == '[{"é": "\u2028"}]'
    with pytest.raises(RequestError, match=r"^tools is nested too deeply"):
        json_text("tools", DEEP)
