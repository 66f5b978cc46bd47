"""Converts items to the messages of a chat: reasoning, text and calls of one turn are one message of the assistant."""

import asyncio
from collections.abc import Sequence
from typing import Any

from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.images.image_reader import ContentPart, ImageReader, content_of
from scheduler_service.frontend.http.responses.items import (
    FunctionCall,
    FunctionCallOutput,
    ItemReference,
    Message,
    Reasoning,
    read_item,
)

ITEMS_AT_ONCE = 64
"""Largest number of items that are converted in one turn of the event loop. An item takes 10 µs."""
_FIRST = ("system", "developer")


async def read_conversation(
    instructions: str | None, items: Sequence[tuple[str, dict[str, Any]]], images: ImageReader
) -> list[Any]:
    """The messages of items, each with its place in the request, behind the instructions. Raises HttpError."""
    found = _Messages(instructions, images)
    for number, (place, item) in enumerate(items, 1):
        found.add(item, place)
        if number % ITEMS_AT_ONCE == 0:
            await asyncio.sleep(0)
    found.end_outputs()
    if not found.messages:
        raise invalid("input has no items", "input")
    return [_joined(message) for message in found.messages]


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose texts are joined, once all texts are known: joining at each text would take quadratic time."""
    between = "\n\n" if message["role"] in _FIRST else "\n"
    joined = message | {"content": content_of(message["content"], between)}
    if "reasoning_content" in message:
        joined["reasoning_content"] = "\n".join(message["reasoning_content"])
    return joined


class _Messages:
    """Messages so far, with lists of texts and images. `instructions`: the text of the first message, if any.

    The images of a function's output are in a message of the user behind it, because few chat templates read images in
    outputs.
    """

    def __init__(self, instructions: str | None, images: ImageReader) -> None:
        self._reader = images
        self._images: list[ContentPart] = []  # of outputs
        self.messages: list[dict[str, Any]] = []
        if instructions:
            self.messages.append({"role": "system", "content": [instructions]})

    def add(self, given: dict[str, Any], place: str) -> None:
        item = read_item(given, place)
        if not isinstance(item, FunctionCallOutput):
            self.end_outputs()
        match item:
            case Message(role="assistant") as message:
                self._turn()["content"] += message.parts(place, self._reader)
            case Message(role=role) as message:
                self._ask(role, message.parts(place, self._reader))
            case Reasoning() as reasoning:
                self._think(reasoning.text(place))
            case FunctionCall() as call:
                function = {"name": call.name, "arguments": call.arguments}
                said = {"id": call.call_id, "type": "function", "function": function}
                self._turn().setdefault("tool_calls", []).append(said)
            case FunctionCallOutput() as output:
                parts = output.parts(place, self._reader)
                self._images += [part for part in parts if not isinstance(part, str)]
                texts = [part for part in parts if isinstance(part, str)]
                told = {"role": "tool", "tool_call_id": output.call_id, "content": texts}
                self.messages.append(told)
            case ItemReference(id=item_id):
                reason = "is no item of a stored response; send the item itself, or store responses with store: true"
                raise invalid(f"{place}: {item_id[:64]!r} {reason}", "input")

    def end_outputs(self) -> None:
        """Add a message with the images of the outputs before."""
        if self._images:
            self.messages.append({"role": "user", "content": self._images})
            self._images = []

    def _ask(self, role: str, parts: list[ContentPart]) -> None:
        """Add a message. Many chat templates read one message of the system, so the first ones become one message."""
        if role in _FIRST and self.messages and all(one["role"] in _FIRST for one in self.messages):
            self.messages[-1]["content"] += parts
        else:
            self.messages.append({"role": role, "content": parts})

    def _think(self, text: str) -> None:
        """Add reasoning, which begins a turn of its own behind a text or a call."""
        turn = self._turn()
        if turn["content"] or "tool_calls" in turn:
            self.messages.append({"role": "assistant", "content": []})
            turn = self.messages[-1]
        if text:
            turn.setdefault("reasoning_content", []).append(text)

    def _turn(self) -> dict[str, Any]:
        """The assistant's message at the end of the chat."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": []})
        return self.messages[-1]
