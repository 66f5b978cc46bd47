"""The events of an assistant's message, in the order in which the model writes the message."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call of a known tool begins. `id` is the call's id if the model wrote an id."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More text of a call's arguments. All texts of a call together are the arguments in JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is over. The arguments of a call that was cut are incomplete JSON."""

    index: int


Event = Reasoning | Content | CallStarted | CallArguments | CallEnded


class EventLog:
    """Collects events, and joins adjacent texts of the same kind."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._kind: type[Reasoning] | type[Content] | int | None = None
        self._parts: list[str] = []
        self.num_calls = 0

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, text)

    def content(self, text: str) -> None:
        self._add(Content, text)

    def arguments(self, text: str) -> None:
        """Add text to the arguments of the latest call."""
        self._add(self.num_calls - 1, text)

    def start_call(self, name: str, call_id: str | None) -> None:
        self._flush()
        self._events.append(CallStarted(self.num_calls, name, call_id))
        self.num_calls += 1

    def end_call(self) -> None:
        self._flush()
        self._events.append(CallEnded(self.num_calls - 1))

    def take(self) -> list[Event]:
        """Return the collected events, and forget them."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _add(self, kind: type[Reasoning] | type[Content] | int, text: str) -> None:
        if not text:
            return
        if kind != self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def _flush(self) -> None:
        if self._parts and self._kind is not None:
            text = "".join(self._parts)
            kind = self._kind
            self._events.append(CallArguments(kind, text) if isinstance(kind, int) else kind(text))
        self._kind, self._parts = None, []
