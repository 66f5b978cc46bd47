"""How a model family writes reasoning and tool calls, as data that the parser and the grammar of calls share."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marks:
    """The texts before and after a part of a message."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class Section:
    """One or several calls between two marks.

    `opens`: marks, each of which begins a section. `starts`: the first characters of a section that has no mark, and
    begins a message; "" if every section has a mark. `first`, `separator`, `last`: the texts around the calls.
    `is_single`: a section has one call, and further calls have sections of their own.
    """

    opens: tuple[str, ...] = ()
    close: str = ""
    first: str = ""
    separator: str = ""
    last: str = ""
    starts: str = ""
    is_single: bool = False


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A call is an object of JSON with the tool's name and the arguments."""

    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = "id"
    writes_id: bool = False


@dataclass(frozen=True, slots=True)
class NamedJson:
    """A call is the tool's name, a mark and the arguments in JSON.

    `prefix`: an optional text before the name. `is_numbered`: the call's number follows the name after a colon, and
    prefix, name and number are the call's id. `id_mark`: the mark before an optional id.
    """

    open: str = ""
    before_arguments: str = ""
    close: str = ""
    prefix: str = ""
    is_numbered: bool = False
    id_mark: str = ""


@dataclass(frozen=True, slots=True)
class Tagged:
    """A call is the tool's name and untyped arguments between tags.

    `has_lines`: a value stands on lines of its own; the line breaks around the value are no part of the value.
    """

    open: str
    name_end: str
    key_open: str
    key_end: str
    value_open: str
    value_close: str
    close: str
    has_lines: bool = False


@dataclass(frozen=True, slots=True)
class PythonCall:
    """A call is a call in Python with keyword arguments."""


@dataclass(frozen=True, slots=True)
class BracedCall:
    """A call is the tool's name and arguments in braces, with keys without quotes and marks around strings."""

    open: str
    quote: str


CallForm = JsonObject | NamedJson | Tagged | PythonCall | BracedCall


@dataclass(frozen=True, slots=True)
class ChatSyntax:
    """How a model family writes messages.

    `family`: a name for logs and `/v1/models`. `reasoning`: the marks around reasoning; None if the family has none.
    `section` and `call`: how calls are written; None if the family has no calls. `drops`: marks that are neither
    content nor reasoning. `arguments_as_objects`: whether the chat template wants a call's arguments as an object
    rather than as a JSON string. `call_id`: a regular expression of the ids that the family writes; "" if calls have
    no ids. `has_channels`: messages have headers with channels (harmony), and no other marks count.
    """

    family: str
    reasoning: Marks | None = None
    section: Section | None = None
    call: CallForm | None = None
    drops: tuple[str, ...] = ()
    arguments_as_objects: bool = True
    call_id: str = ""
    has_channels: bool = False

    @property
    def has_calls(self) -> bool:
        return self.call is not None or self.has_channels

    @property
    def marks(self) -> frozenset[str]:
        """All texts that may be special tokens of the model's tokenizer."""
        found = list(self.drops)
        for part in (self.reasoning, self.section, self.call):
            for name in getattr(part, "__slots__", ()):
                value = getattr(part, name)
                found += value if isinstance(value, tuple) else [value] if isinstance(value, str) else []
        return frozenset(filter(None, (mark.strip() for mark in found)))

    def needs_special_tokens(self, special_tokens: Collection[str]) -> bool:
        """Whether the text must be decoded with special tokens, because a mark contains a special token."""
        return any(token in mark for mark in self.marks for token in special_tokens if token)
