"""The output of a response: the events of an assistant's message as items, and as OpenAI's events about items.

Adjacent texts of a kind are one item. Events are pairs of a type and of JSON members, without the number in the stream.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from scheduler_service.frontend.chat.events import CallArguments, CallEnded, CallStarted, Content, Event, Reasoning
from scheduler_service.frontend.http.openai.chat_choice import new_call_id
from scheduler_service.frontend.http.responses.reasoning_content import encode_reasoning

Kind = Literal["reasoning", "message", "function_call"]
Shown = tuple[str, str]
"""The type of an event, and the JSON members of the event."""
_PREFIXES: dict[Kind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_DELTAS: dict[Kind, str] = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


@dataclass(slots=True)
class OutputItem:
    """An item so far. `logprobs`: JSON texts of the log-probabilities of the item's tokens.

    `has_encrypted`: reasoning has the field `encrypted_content`.
    """

    kind: Kind
    id: str
    index: int
    name: str = ""
    call_id: str = ""
    has_encrypted: bool = False
    status: str = "in_progress"
    texts: list[str] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def num_characters(self) -> int:
        return sum(map(len, self.texts)) + sum(map(len, self.logprobs))

    def json(self, *, is_empty: bool = False) -> str:
        """The item as JSON. `is_empty`: without its text, as at its beginning."""
        text = "" if is_empty else self.text
        said: dict[str, Any] = {"id": self.id, "type": self.kind, "status": self.status}
        if self.kind == "function_call":
            return json.dumps(said | {"call_id": self.call_id, "name": self.name, "arguments": text})
        said |= {"role": "assistant"} if self.kind == "message" else {"summary": list[str]()}
        if self.kind == "reasoning" and self.has_encrypted:
            said["encrypted_content"] = None if is_empty else encode_reasoning(text)
        content = "" if is_empty else self.part()
        return f'{json.dumps(said)[:-1]}, "content": [{content}]}}'

    def part(self, *, is_empty: bool = False) -> str:
        """The only part of the item's content as JSON."""
        text = json.dumps("" if is_empty else self.text)
        if self.kind == "reasoning":
            return f'{{"type": "reasoning_text", "text": {text}}}'
        logprobs = "" if is_empty else ", ".join(self.logprobs)
        return f'{{"type": "output_text", "text": {text}, "annotations": [], "logprobs": [{logprobs}]}}'

    def place(self) -> str:
        """Where the item is, as JSON members of events about its content."""
        place = f'"item_id": "{self.id}", "output_index": {self.index}'
        return place if self.kind == "function_call" else f'{place}, "content_index": 0'


class OutputItems:
    """The items so far. `base`: a hexadecimal text that only this response has. `call_id`: as in a `ChatSyntax`.

    `is_streamed`: yield the events of a stream. `has_encrypted`: as in an `OutputItem`.
    """

    def __init__(self, base: str, call_id: str = "", *, is_streamed: bool = True, has_encrypted: bool = False) -> None:
        self._base, self._call_id, self._is_streamed = base, call_id, is_streamed
        self._has_encrypted = has_encrypted
        self.items: list[OutputItem] = []
        self._logprobs: list[str] = []  # of tokens whose text is not known yet
        self.num_tokens = 0

    def add(self, events: Iterable[Event], num_tokens: int, logprobs: Iterable[str] = ()) -> Iterator[Shown]:
        """Add events, which have `num_tokens` tokens and their log-probabilities. Yields events of the stream.

        Log-probabilities belong to the next text of the answer. Those of reasoning and of calls are dropped.
        """
        self.num_tokens += num_tokens
        self._logprobs += logprobs
        other = False
        for event in events:
            match event:
                case Reasoning(text) | Content(text):
                    kind: Kind = "reasoning" if isinstance(event, Reasoning) else "message"
                    yield from self._begin(kind)
                    yield from self._extend(text)
                    other |= kind == "reasoning"
                case CallStarted(number, name, call_id):
                    given = call_id or new_call_id("call_", self._base, f"{number:05x}", self._call_id)
                    yield from self._begin("function_call", name, given)
                    other = True
                case CallArguments(_, text):
                    yield from self._extend(text)
                    other = True
                case CallEnded():
                    yield from self._close()
        if other:
            self._logprobs.clear()

    def finish(self, *, is_cut: bool) -> Iterator[Shown]:
        """End the last item. An answer that is not cut has a message or a call, though it be empty."""
        if not is_cut and all(item.kind == "reasoning" for item in self.items):
            yield from self._begin("message")
        if self._logprobs and self.items and self.items[-1].kind == "message":
            yield from self._extend("")  # the log-probabilities of tokens without a text, such as the last token
        yield from self._close("incomplete" if is_cut else "completed")

    def _begin(self, kind: Kind, name: str = "", call_id: str = "") -> Iterator[Shown]:
        """Begin an item, unless the text continues the last item."""
        last = self.items[-1] if self.items else None
        if last is not None and last.status == "in_progress" and last.kind == kind != "function_call":
            return
        yield from self._close()
        index = len(self.items)
        item_id = f"{_PREFIXES[kind]}_{self._base}{index:04x}"
        item = OutputItem(kind, item_id, index, name, call_id, self._has_encrypted)
        self.items.append(item)
        if self._is_streamed:
            yield from _begun(item)

    def _extend(self, text: str) -> Iterator[Shown]:
        item, logprobs = self.items[-1], list[str]()
        item.texts.append(text)
        if item.kind == "message":
            logprobs, self._logprobs = self._logprobs, []
            item.logprobs += logprobs
        if self._is_streamed:
            yield _extended(item, text, logprobs)

    def _close(self, status: str = "completed") -> Iterator[Shown]:
        """End the last item, if it has not ended."""
        if not self.items or self.items[-1].status != "in_progress":
            return
        item = self.items[-1]
        item.status = status
        if item.kind == "function_call":
            item.status = "completed" if _is_object(item.text) else "incomplete"
        if self._is_streamed:
            yield from _ended(item)


def _begun(item: OutputItem) -> Iterator[Shown]:
    yield "response.output_item.added", f'"output_index": {item.index}, "item": {item.json(is_empty=True)}'
    if item.kind != "function_call":
        yield "response.content_part.added", f'{item.place()}, "part": {item.part(is_empty=True)}'


def _extended(item: OutputItem, text: str, logprobs: list[str]) -> Shown:
    members = f'{item.place()}, "delta": {json.dumps(text)}'
    if item.kind == "message":
        members += f', "logprobs": [{", ".join(logprobs)}]'
    return f"{_DELTAS[item.kind]}.delta", members


def _ended(item: OutputItem) -> Iterator[Shown]:
    if item.kind == "function_call":
        said = json.dumps({"name": item.name, "arguments": item.text})
        yield f"{_DELTAS[item.kind]}.done", f"{item.place()}, {said[1:-1]}"
    else:
        whole = f'{item.place()}, "text": {json.dumps(item.text)}'
        if item.kind == "message":
            whole += f', "logprobs": [{", ".join(item.logprobs)}]'
        yield f"{_DELTAS[item.kind]}.done", whole
        yield "response.content_part.done", f'{item.place()}, "part": {item.part()}'
    yield "response.output_item.done", f'"output_index": {item.index}, "item": {item.json()}'


def _is_object(text: str) -> bool:
    """Whether the arguments of a call are whole."""
    if not text.rstrip().endswith("}"):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
