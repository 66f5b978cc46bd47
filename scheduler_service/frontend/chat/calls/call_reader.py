"""The parts of every reader of calls: the head of a call up to the arguments, and then the arguments."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Protocol

from scheduler_service.frontend.chat.events import EventLog
from scheduler_service.frontend.chat.tape import Reader, Tape
from scheduler_service.frontend.chat.tools import Tool

MAX_NAME = 256
"""Largest number of characters of a tool's name, an argument's name or an id in a model's text."""


@dataclass(frozen=True, slots=True)
class Head:
    """The start of a call of a known tool. `is_whole`: the call has ended and has no arguments."""

    tool: Tool
    id: str | None = None
    is_whole: bool = False


class CallReader(Protocol):
    """Reads one call.

    `head` consumes the text up to the arguments, or returns None. Before `head` returns, no event is logged. A text
    that ends behind the tool's name is a head too. `arguments` logs the arguments as they come, and returns whether
    the call was complete; the text behind an incomplete call is not consumed.
    """

    def head(self) -> Generator[None, None, Head | None]: ...

    def arguments(self, head: Head, /) -> Reader: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """The text, the events and the tools that a reader works with."""

    tape: Tape
    log: EventLog
    tools: Mapping[str, Tool]

    def tool(self, stops: str) -> Generator[None, None, Tool | None]:
        """Consume the name of a tool, up to one of the characters `stops`."""
        name = yield from self.tape.until(stops, MAX_NAME, self.tools)
        return None if name is None else self.tools.get(name)
