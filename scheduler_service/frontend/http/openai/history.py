"""Converts messages of OpenAI's chat completions, as agents send them back, to the messages of a `pb.Chat`.

The content may be null, missing, or a list of parts; the arguments of a tool call may be a text or an object. A field
that neither OpenAI's messages nor the model's chat template have is refused by name. A rendering process checks the
arguments of tool calls, so that no large JSON text is parsed here.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.checking.checks import MAX_MESSAGES, check_length, invalid
from scheduler_service.frontend.checking.prompt import ROLES
from scheduler_service.frontend.http.chats.json_values import (
    check_keys,
    json_text,
    read_name,
    read_object,
    read_text,
    shown,
    shown_key,
)

MESSAGES_AT_ONCE = 64
"""Largest number of messages that are converted in one turn of the event loop. Converting a message takes 10 µs."""
MAX_PARTS = 4096
"""Largest number of parts, and of tool calls, of a message. They are converted in one turn of the event loop."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts, and the key of a part that contains the part's text."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_DROPPED = ("annotations", "parsed", "parsed_arguments")
"""Fields of answers that say nothing to a model. OpenAI's client adds the last two to the messages that it parses."""


async def read_history(messages: Any, template_names: Callable[[str], bool], place: str = "messages") -> pb.Chat:
    """Convert messages, which are parsed JSON, to a chat without further settings. Raises RequestError.

    `template_names`: whether the model's chat template names a word (`Tokenizer.template_names`).
    `place`: the name of the messages in errors.
    """
    if not isinstance(messages, list):
        invalid(f"{place} must be a list of messages")
    check_length(place, len(messages), MAX_MESSAGES)
    chat = pb.Chat()
    for position, message in enumerate(messages):
        if position and position % MESSAGES_AT_ONCE == 0:
            await asyncio.sleep(0)
        _add_message(chat, message, template_names, f"{place}[{position}]")
    return chat


def _add_message(chat: pb.Chat, message: Any, template_names: Callable[[str], bool], place: str) -> None:
    given = {name: value for name, value in read_object(place, message).items() if value is not None}
    role = given.pop("role", None)
    if role not in ROLES:
        invalid(f"{place}.role is {shown(role)}; it must be one of {', '.join(ROLES)}")
    if "content" not in given and role not in ("assistant", "tool"):
        invalid(f"{place}.content is missing")
    texts = list(_texts(f"{place}.content", given.pop("content", "")))
    fields: dict[str, Any] = {}
    for name, value in given.items():
        where = f"{place}.{shown_key(name)}"
        if name == "refusal":
            texts.append(read_text(where, value))
        elif name in ("tool_calls", *_REASONING):
            if role != "assistant":
                invalid(f"{where} is for messages of the assistant, and this role is {role}")
            if name == "tool_calls":
                fields |= {"tool_calls": calls} if (calls := _calls(where, value)) else {}
            else:
                fields.setdefault("reasoning_content", read_text(where, value))
        elif name in ("name", "tool_call_id"):
            fields[name] = read_name(where, value)
        elif name == "function_call":
            invalid(f"{where} is the old form of tool calls; use tool_calls")
        elif name == "audio":
            invalid(f"{where} is set, and this model reads text alone")
        elif name not in _DROPPED:
            if not template_names(name):
                invalid(f"{where} is no field of messages, and the model's chat template does not read it")
            fields[name] = value
    content = "\n".join(text for text in texts if text)
    chat.messages.add(role=role, content=content, fields=json_text(place, fields) if fields else "")


def _texts(place: str, content: Any) -> Iterator[str]:
    """Yield the text of each part of a content. Different parts are different paragraphs for the model."""
    if not isinstance(content, list):
        yield read_text(place, content)
        return
    check_length(place, len(content), MAX_PARTS)
    for number, part in enumerate(content):
        where = f"{place}[{number}]"
        kind = read_object(where, part).get("type")
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            invalid(f"{where}.type is {shown(kind)}, and this model reads text alone; it must be text or refusal")
        check_keys(where, part, ("type", _TEXT_PARTS[kind], *_DROPPED))
        yield read_text(f"{where}.{_TEXT_PARTS[kind]}", part.get(_TEXT_PARTS[kind]))


def _calls(place: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        invalid(f"{place} must be a list")
    check_length(place, len(calls), MAX_PARTS)
    return [_call(f"{place}[{number}]", call) for number, call in enumerate(calls)]


def _call(place: str, call: Any) -> dict[str, Any]:
    check_keys(place, read_object(place, call), ("id", "type", "function", "index"))
    kind = call.get("type", "function")
    if kind != "function":
        invalid(f"{place}.type is {shown(kind)}; it must be function")
    function = read_object(f"{place}.function", call.get("function"))
    check_keys(f"{place}.function", function, ("name", "arguments", *_DROPPED))
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict | None):
        invalid(f"{place}.function.arguments is {shown(arguments)}; it must be an object, or the JSON text of one")
    said = {"name": read_name(f"{place}.function.name", function.get("name")), "arguments": arguments}
    found = {"type": "function", "function": said}
    return found if call.get("id") is None else {"id": read_name(f"{place}.id", call["id"]), **found}
