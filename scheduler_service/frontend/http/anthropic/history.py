"""Converts Anthropic's messages to those of OpenAI's chat completions, which `read_history` reads.

A result of a tool becomes a message of its own. Its images are in a message of the user behind it, because few chat
templates read images in results. Successive messages of one role become one message. Redacted thinking
is dropped, because only its author can read it.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from scheduler_service.frontend.checking.checks import MAX_MESSAGES, check_length, invalid
from scheduler_service.frontend.http.chats.json_values import check_keys, read_name, read_object, read_text, shown
from scheduler_service.frontend.http.images.image_reader import TYPES, ContentPart, ImageReader, ImageSource, content_of

MAX_BLOCKS = 4096
"""Largest number of content blocks of a message."""
BLOCKS_AT_ONCE = 128
"""Largest number of messages and blocks that are converted in one turn of the event loop."""
FAILED = "Error: "
"""Text before the result of a tool that has failed, because chat templates have no field for failures."""
_ROLES = ("user", "assistant", "system")
_OF_ASSISTANT = ("thinking", "redacted_thinking", "tool_use")


async def read_messages(system: Any, messages: list[dict[str, Any]], images: ImageReader) -> list[dict[str, Any]]:
    """OpenAI's messages with the same meaning, and an `ImageSource` for each image. Raises RequestError."""
    check_length("messages", len(messages), MAX_MESSAGES)
    found = _Messages(images)
    if system is not None:
        found.message("system").parts += found.texts("system", system)
    num_read = 0
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        for where, block, role in _blocks(place, message):
            found.read(where, block, role)
            num_read += 1
            if num_read % BLOCKS_AT_ONCE == 0:
                await asyncio.sleep(0)
    found.end_results()
    return [message.shown() for message in found.messages]


def _blocks(place: str, message: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield the place of each block of a message, the block and the message's role."""
    check_keys(place, message, ("role", "content"))
    role = message.get("role")
    if role not in _ROLES:
        invalid(f"{place}.role is {shown(role)}; it must be one of {', '.join(_ROLES)}")
    content = message.get("content")
    if not isinstance(content, list) or not content:
        yield f"{place}.content", {"type": "text", "text": "" if content == [] else content}, role
        return
    check_length(f"{place}.content", len(content), MAX_BLOCKS)
    for number, block in enumerate(content):
        yield f"{place}.content[{number}]", block, role


@dataclass(slots=True)
class _Message:
    role: str
    parts: list[ContentPart] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def shown(self) -> dict[str, Any]:
        """The message of OpenAI's API. Different blocks are different paragraphs for the model."""
        message = {"role": self.role, "content": content_of(self.parts), **self.names}
        if self.reasoning:
            message["reasoning_content"] = "\n".join(self.reasoning)
        return message | {"tool_calls": self.calls} if self.calls else message


class _Messages:
    """The converted messages.

    `_tools`: the names of tools, by the ids of their calls. `_images`: images of results, for the message behind them.
    """

    def __init__(self, images: ImageReader) -> None:
        self._reads_images, self._reads = images.is_possible, images.reads
        self._images: list[ContentPart] = []
        self.messages: list[_Message] = []
        self._tools: dict[str, str] = {}

    def message(self, role: str) -> _Message:
        """The last message, if it is of the same role; otherwise a new message."""
        if role != "tool":
            self.end_results()
        if not self.messages or self.messages[-1].role != role or role == "tool":
            self.messages.append(_Message(role))
        return self.messages[-1]

    def end_results(self) -> None:
        """Add a message with the images of the results before."""
        if self._images:
            self.messages.append(_Message("user", self._images))
            self._images = []

    def read(self, place: str, block: Any, role: str) -> None:
        """Add a block of a message."""
        kind = read_object(place, block).get("type")
        if kind == "text":
            self.message(role).parts.append(_text(place, block))
        elif kind == "image" and self._reads_images and role == "user":
            self.message(role).parts.append(_image(place, block))
        elif kind == "tool_result" and role == "user":
            self._read_result(place, block)
        elif kind in _OF_ASSISTANT and role == "assistant":
            self._read_own(place, block, kind)
        elif kind in ("tool_result", *_OF_ASSISTANT) or (kind == "image" and self._reads_images):
            invalid(f"{place}.type is {shown(kind)}, which messages of the role {role} do not have")
        else:
            self._refuse_kind(place, kind)

    def _read_own(self, place: str, block: dict[str, Any], kind: str) -> None:
        """Add a block that only an assistant writes."""
        message = self.message("assistant")
        if kind == "tool_use":
            check_keys(place, block, ("type", "id", "name", "input", "cache_control", "caller"))
            call_id, name = read_name(f"{place}.id", block.get("id")), read_name(f"{place}.name", block.get("name"))
            self._tools[call_id] = name
            function = {"name": name, "arguments": read_object(f"{place}.input", block.get("input"))}
            message.calls.append({"id": call_id, "type": "function", "function": function})
        elif kind == "thinking":
            check_keys(place, block, ("type", "thinking", "signature", "cache_control"))
            text = read_text(f"{place}.thinking", block.get("thinking"))
            message.reasoning += [text] if text else []
        else:
            check_keys(place, block, ("type", "data", "cache_control"))

    def _read_result(self, place: str, block: dict[str, Any]) -> None:
        check_keys(place, block, ("type", "tool_use_id", "content", "is_error", "cache_control"))
        call_id = read_name(f"{place}.tool_use_id", block.get("tool_use_id"))
        parts = [] if block.get("content") is None else list(self._parts(f"{place}.content", block["content"]))
        texts = [part for part in parts if isinstance(part, str)]
        if not isinstance(is_error := block.get("is_error"), bool | None):
            invalid(f"{place}.is_error is {shown(is_error)}; it must be true or false")
        message = self.message("tool")
        message.parts += [FAILED + "".join(texts[:1]), *texts[1:]] if is_error else texts
        self._images += [part for part in parts if not isinstance(part, str)]
        message.names["tool_call_id"] = call_id
        if call_id in self._tools:
            message.names["name"] = self._tools[call_id]

    def texts(self, place: str, content: Any) -> list[str]:
        """The texts of a content that has only text."""
        parts = list(self._parts(place, content))
        if len(found := [part for part in parts if isinstance(part, str)]) < len(parts):
            invalid(f"{place} has an image; only messages of the user and results of tools have images")
        return found

    def _parts(self, place: str, content: Any) -> Iterator[ContentPart]:
        """Yield the texts and images of a content."""
        if not isinstance(content, list):
            yield read_text(place, content)
            return
        check_length(place, len(content), MAX_BLOCKS)
        for number, block in enumerate(content):
            where = f"{place}[{number}]"
            kind = read_object(where, block).get("type")
            if kind == "image" and self._reads_images:
                yield _image(where, block)
            elif kind == "text":
                yield _text(where, block)
            else:
                self._refuse_kind(where, kind)

    def _refuse_kind(self, place: str, kind: Any) -> NoReturn:
        known = f"text, {'image, ' if self._reads_images else ''}thinking, redacted_thinking, tool_use and tool_result"
        invalid(f"{place}.type is {shown(kind)}, and this model reads {self._reads}; the types are {known}")


def _text(place: str, block: dict[str, Any]) -> str:
    """The text of a block. Citations of an earlier answer say nothing to a model."""
    check_keys(place, block, ("type", "text", "cache_control", "citations"))
    return read_text(place if place.endswith(".content") else f"{place}.text", block.get("text"))


def _image(place: str, block: dict[str, Any]) -> ImageSource:
    check_keys(place, block, ("type", "source", "cache_control"))
    source = read_object(f"{place}.source", block.get("source"))
    kind = source.get("type")
    if kind == "url":
        check_keys(f"{place}.source", source, ("type", "url"))
        return ImageSource(f"{place}.source.url", url=read_text(f"{place}.source.url", source.get("url")))
    if kind != "base64":
        invalid(f"{place}.source.type is {shown(kind)}; it must be base64 or url, because this server keeps no files")
    check_keys(f"{place}.source", source, ("type", "media_type", "data"))
    if (media_type := source.get("media_type")) not in TYPES:
        invalid(f"{place}.source.media_type is {shown(media_type)}; it must be one of {', '.join(TYPES)}")
    return ImageSource(f"{place}.source.data", data=read_text(f"{place}.source.data", source.get("data")))
