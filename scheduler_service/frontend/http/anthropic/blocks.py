"""The content blocks of an answer: a model's events as Anthropic's events, and their sum as a whole message."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from scheduler_service.frontend.chat.events import CallArguments, CallStarted, Content, Event, Reasoning
from scheduler_service.frontend.http.chats.call_object import CallObject
from scheduler_service.frontend.http.openai.chat_choice import new_call_id

SIGNATURE = "pagewire"
"""The signature of thinking. Clients send only thinking with a signature back, and the server checks no signature."""
_TEXTS = {Reasoning: ("thinking", "thinking_delta"), Content: ("text", "text_delta")}
_MORE: dict[str, dict[str, Any]] = {"thinking": {"signature": ""}, "text": {"citations": None}}
"""Members of a block beside its text."""


@dataclass(slots=True)
class Blocks:
    """`base`: a hexadecimal text that only this request has. `call_id`: as of `ChatChoice`.

    `shows_thinking`: whether blocks of thinking have a text.
    """

    base: str
    call_id: str = ""
    shows_thinking: bool = True
    num_calls: int = 0
    _index: int = -1
    _open: str = ""

    def add(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Convert events. Successive texts of a kind are one block."""
        found: list[dict[str, Any]] = []
        for event in events:
            match event:
                case Reasoning(text) | Content(text):
                    kind, delta = _TEXTS[type(event)]
                    if self._open != kind:
                        found += self._begin({"type": kind, kind: ""} | _MORE[kind])
                    if kind == "text" or self.shows_thinking:
                        found.append(self._delta({"type": delta, kind: text}))
                case CallStarted(index, name, call_id):
                    self.num_calls += 1
                    call_id = call_id or new_call_id("toolu_", self.base, f"{index:05x}", self.call_id)
                    call = {"id": call_id, "name": name, "input": {}, "caller": {"type": "direct"}}
                    found += self._begin({"type": "tool_use"} | call)
                case CallArguments(_, text):
                    found.append(self._delta({"type": "input_json_delta", "partial_json": text}))
                case _:
                    found += self.end()
        return found

    def end(self) -> list[dict[str, Any]]:
        """End the open block."""
        if not self._open:
            return []
        signed = [self._delta({"type": "signature_delta", "signature": SIGNATURE})] if self._open == "thinking" else []
        self._open = ""
        return [*signed, {"type": "content_block_stop", "index": self._index}]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        ended = self.end()
        self._index += 1
        self._open = block["type"]
        return [*ended, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


@dataclass(slots=True)
class WholeBlock:
    """A content block as the sum of its events."""

    start: dict[str, Any]
    texts: list[str] = field(default_factory=list)
    input: CallObject = field(default_factory=CallObject)

    def json(self) -> str:
        kind = self.start["type"]
        if kind == "tool_use":
            shown = json.dumps({name: value for name, value in self.start.items() if name != "input"})
            return f'{shown.removesuffix("}")}, "input": {self.input.text()}}}'
        return json.dumps(self.start | {kind: "".join(self.texts)})


def add_to_whole(blocks: list[WholeBlock], events: Iterable[dict[str, Any]]) -> None:
    """Add Anthropic's events to the blocks of a whole message."""
    for event in events:
        match event:
            case {"type": "content_block_start", "content_block": block}:
                blocks.append(WholeBlock(block))
            case {"delta": {"type": "input_json_delta", "partial_json": text}}:
                blocks[-1].input.add(text)
            case {"delta": {"type": "signature_delta", "signature": signature}}:
                blocks[-1].start = blocks[-1].start | {"signature": signature}
            case {"delta": {"text": text} | {"thinking": text}}:
                blocks[-1].texts.append(text)
