"""Converts messages of OpenAI's chat completions, as agents send them back, to the messages of a `pb.Chat`.

The content may be null, missing, or a list of parts; the arguments of a tool call may be a text or an object. A field
that neither OpenAI's messages nor the model's chat template have is refused by name. A rendering process checks the
arguments of tool calls, so that no large JSON text is parsed here.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.checking.chat import ROLES
from scheduler_service.frontend.checking.checks import MAX_MESSAGES, check_length, invalid
from scheduler_service.frontend.http.chats.json_values import (
    check_keys,
    json_text,
    read_name,
    read_object,
    read_text,
    shown,
    shown_key,
)
from scheduler_service.frontend.http.errors import image_places
from scheduler_service.frontend.http.images.image_reader import (
    SOUND_FORMATS,
    ContentPart,
    ImageReader,
    ImageSource,
    joined_parts,
)

MESSAGES_AT_ONCE = 64
"""Largest number of messages that are converted in one turn of the event loop. Converting a message takes 10 µs."""
MAX_PARTS = 4096
"""Largest number of parts, and of tool calls, of a message. They are converted in one turn of the event loop."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts with a text, and the key of a part that contains the part's text."""
_DETAILS = ("auto", "low", "high", "original")
"""OpenAI's sizes of images, which have no effect: the size that the model's files state is read."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_DROPPED = ("annotations", "parsed", "parsed_arguments")
"""Fields of answers that say nothing to a model. OpenAI's client adds the last two to the messages that it parses."""


class _Message(NamedTuple):
    place: str
    role: str
    parts: Sequence[ContentPart]
    fields: dict[str, Any]


async def read_history(
    messages: Any, template_names: Callable[[str], bool], images: ImageReader, place: str = "messages"
) -> pb.Chat:
    """Convert messages, which are parsed JSON, to a chat without further settings. Raises RequestError and HttpError.

    `template_names`: whether the model's chat template names a word (`Tokenizer.template_names`).
    `place`: the name of the messages in errors.
    """
    if not isinstance(messages, list):
        invalid(f"{place} must be a list of messages")
    check_length(place, len(messages), MAX_MESSAGES)
    read: list[_Message] = []
    for position, message in enumerate(messages):
        if position and position % MESSAGES_AT_ONCE == 0:
            await asyncio.sleep(0)
        read.append(_read(message, template_names, f"{place}[{position}]", images))
    sources = [part for message in read for part in message.parts if isinstance(part, ImageSource)]
    images.check_rest(sources)
    chat = pb.Chat()
    for position, message in enumerate(read):
        if position and position % MESSAGES_AT_ONCE == 0:
            await asyncio.sleep(0)
        _write(message, chat)
    found, places = zip(sources, await images.read(sources), strict=True), dict[str, str]()
    for position, written in enumerate(chat.messages):
        for number, part in enumerate(written.parts):
            if part.HasField("image"):
                source, image = next(found)
                part.image.CopyFrom(image)
                places[f"chat.messages[{position}].parts[{number}].image"] = source.place
            elif part.HasField("sound"):
                source, sound = next(found)
                part.sound.data = sound.data
                places[f"chat.messages[{position}].parts[{number}].sound"] = source.place
    image_places.set(places)
    return chat


def _write(message: _Message, chat: pb.Chat) -> None:
    fields = json_text(message.place, message.fields) if message.fields else ""
    written = chat.messages.add(role=message.role, fields=fields)
    parts = joined_parts(message.parts)  # different parts are different paragraphs for the model
    if not any(isinstance(part, ImageSource) for part in parts):
        written.content = "".join(map(str, parts))
        return
    for part in parts:
        if isinstance(part, str):
            written.parts.add(text=part)
        elif part.format:
            written.parts.add(sound=pb.Sound())
        else:
            written.parts.add(image=pb.Image())


def _read(message: Any, template_names: Callable[[str], bool], place: str, images: ImageReader) -> _Message:
    given = {name: value for name, value in read_object(place, message).items() if value is not None}
    role = given.pop("role", None)
    if role not in ROLES:
        invalid(f"{place}.role is {shown(role)}; it must be one of {', '.join(ROLES)}")
    if "content" not in given and role not in ("assistant", "tool"):
        invalid(f"{place}.content is missing")
    parts = list(_parts(f"{place}.content", given.pop("content", ""), images))
    fields: dict[str, Any] = {}
    for name, value in given.items():
        where = f"{place}.{shown_key(name)}"
        if name == "refusal":
            parts.append(read_text(where, value))
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
            invalid(f"{where} is set, and sounds of the assistant are not read here")
        elif name not in _DROPPED:
            if not template_names(name):
                invalid(f"{where} is no field of messages, and the model's chat template does not read it")
            fields[name] = value
    return _Message(place, role, parts, fields)


def _parts(place: str, content: Any, images: ImageReader) -> Iterator[ContentPart]:
    """Yield the parts of a content."""
    if not isinstance(content, list):
        yield read_text(place, content)
        return
    check_length(place, len(content), MAX_PARTS)
    for number, part in enumerate(content):
        where = f"{place}[{number}]"
        if isinstance(part, ImageSource):
            yield part  # of another API
            continue
        kind = read_object(where, part).get("type")
        if kind == "image_url" and images.is_possible:
            yield _image(where, part)
            continue
        if kind == "input_audio" and images.hears:
            yield _sound(where, part)
            continue
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            of_items = "image_url" * images.is_possible or "input_audio" * images.hears
            known = f"text, {of_items} or refusal" if of_items else "text or refusal"
            invalid(f"{where}.type is {shown(kind)}, and this model reads {images.reads}; it must be {known}")
        check_keys(where, part, ("type", _TEXT_PARTS[kind], *_DROPPED))
        yield read_text(f"{where}.{_TEXT_PARTS[kind]}", part.get(_TEXT_PARTS[kind]))


def _image(place: str, part: dict[str, Any]) -> ImageSource:
    check_keys(place, part, ("type", "image_url"))
    given = read_object(f"{place}.image_url", part.get("image_url"))
    check_keys(f"{place}.image_url", given, ("url", "detail"))
    check_detail(f"{place}.image_url.detail", given.get("detail"))
    return ImageSource(f"{place}.image_url.url", url=read_text(f"{place}.image_url.url", given.get("url")))


def _sound(place: str, part: dict[str, Any]) -> ImageSource:
    check_keys(place, part, ("type", "input_audio"))
    given = read_object(f"{place}.input_audio", part.get("input_audio"))
    check_keys(f"{place}.input_audio", given, ("data", "format"))
    stated = given.get("format")
    if stated not in SOUND_FORMATS:
        invalid(f"{place}.input_audio.format is {shown(stated)}; it must be {' or '.join(SOUND_FORMATS)}")
    data = read_text(f"{place}.input_audio.data", given.get("data"))
    return ImageSource(f"{place}.input_audio.data", data=data, format=stated)


def check_detail(place: str, detail: Any) -> None:
    """Refuse a size of images that OpenAI does not know. Raises RequestError."""
    if detail not in (None, *_DETAILS):
        invalid(f"{place} is {shown(detail)}; it must be one of {', '.join(_DETAILS)}")


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
