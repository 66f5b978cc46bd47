"""One choice of a chat's answer: the events of an output as OpenAI's deltas, and their sum as OpenAI's message."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from scheduler_service.frontend.chat.events import CallArguments, CallStarted, Content, Event, Reasoning

_SHORT = 9
"""Length of the ids that Mistral's chat templates accept."""


@dataclass(slots=True)
class ChatChoice:
    """`base`: a hexadecimal text that only this request has. `call_id`: a regular expression of the ids that the
    model's chat template accepts; "" for any id. `shows_reasoning`: reasoning is part of the answer.
    """

    index: int
    base: str
    call_id: str = ""
    shows_reasoning: bool = True
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, events: Iterable[Event], num_tokens: int, *, keeps: bool) -> dict[str, Any]:
        """Convert events, which have `num_tokens` tokens, to one delta. `keeps`: keep all texts for `message`."""
        content, reasoning, calls = [], [], list[dict[str, Any]]()
        for event in events:
            match event:
                case Reasoning(text):
                    reasoning.append(text)
                case Content(text):
                    content.append(text)
                case CallStarted(index, name, call_id):
                    call = {
                        "id": call_id or new_call_id("call_", self.base, f"{self.index:02x}{index:03x}", self.call_id),
                        "type": "function",
                    }
                    calls.append({"index": index} | call | {"function": {"name": name, "arguments": ""}})
                    self.calls.append(call | {"function": {"name": name}})
                    self.arguments.append([])
                case CallArguments(index, text):
                    if calls and calls[-1]["index"] == index:
                        calls[-1]["function"]["arguments"] += text
                    else:
                        calls.append({"index": index, "function": {"arguments": text}})
                    self.arguments[index].append(text)
        self.num_tokens += num_tokens
        if keeps:
            self.content += content
            self.reasoning += reasoning
        delta: dict[str, Any] = {"content": "".join(content)} if content else {}
        if reasoning and self.shows_reasoning:
            delta["reasoning"] = delta["reasoning_content"] = "".join(reasoning)
        return delta | {"tool_calls": calls} if calls else delta

    def message(self) -> dict[str, Any]:
        """The whole message, from the kept texts."""
        text = "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": None if self.calls and not text else text}
        message |= {"refusal": None}
        if self.reasoning and self.shows_reasoning:
            message["reasoning"] = message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [
                call | {"function": call["function"] | {"arguments": "".join(arguments)}}
                for call, arguments in zip(self.calls, self.arguments, strict=True)
            ]
        return message

    def finish_reason(self, reason: str) -> str:
        """OpenAI's reason. An output that a stop string cut within a call ended by the stop string, not by the call."""
        return "tool_calls" if reason == "stop" and self.calls and _is_json("".join(self.arguments[-1])) else reason


def new_call_id(prefix: str, base: str, number: str, accepted: str) -> str:
    """An id for a call to which the model gave none. `accepted`: as `call_id` of `ChatChoice`."""
    if accepted and not re.fullmatch(accepted, f"{prefix}{base}{number}"):
        return (base + number)[-_SHORT:]
    return f"{prefix}{base[:19]}{number}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
