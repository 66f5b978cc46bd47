"""Writes a grammar in llguidance's variant of Lark, rule by rule."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from scheduler_service.frontend.chat.tools import Tool
from scheduler_service.frontend.forms.form_compiler import rewrite_schema
from scheduler_service.frontend.forms.schema_numbers import NumberError, rewrite_numbers
from scheduler_service.frontend.forms.schema_text import (
    ANNOTATIONS,
    SchemaError,
    read_schema,
    schemas_in,
    write_schema,
)

SPACE = "[ \\n]{0,8}"
"""Whitespace between the parts of a call, as a regular expression."""
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
_DEFINITIONS = ("$defs", "definitions")
_NOTES = ("title", "description", "$comment", "$schema", "deprecated", *ANNOTATIONS)
"""Keys of schemas without effect on outputs; left out, because descriptions are most of a tool's schema."""


class Lark:
    """The rules of one grammar. `special`: ids of the special tokens of the model's tokenizer, by their texts."""

    def __init__(self, special: Mapping[str, int], *, closes_objects: bool) -> None:
        self._special = sorted(special.items(), key=lambda item: -len(item[0]))
        self._closes_objects = closes_objects
        self._rules = ["TEXT: /(?s:.*)/"]
        self._names: dict[str, str] = {}
        self._terminals: dict[str, str] = {}

    def text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, ""])

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule, unless the grammar has the same rule, and return its name."""
        key = f"{options}: {body}"
        if key not in self._names:
            self._names[key] = f"r{len(self._names)}"
            self._rules.append(f"{self._names[key]}{key}")
        return self._names[key]

    def text_without(self, start: str) -> str:
        """Any text that does not begin with the regular expression `start`."""
        if not start:
            return "TEXT"
        return self._terminal(f"TEXT & ~{self.regex(f'(?s:{start}.*)')}")

    def any_of(self, parts: Iterable[str]) -> str:
        found = list(dict.fromkeys(parts))
        return found[0] if len(found) == 1 else self.rule(" | ".join(found))

    def is_special(self, mark: str) -> bool:
        return any(token in mark for token, _ in self._special)

    def mark(self, text: str) -> str:
        """A text that the model writes with its special tokens where the text contains special tokens."""
        for token, number in self._special:
            if token in text:
                before, after = text.split(token, 1)
                return " ".join(filter(None, (self.mark(before), f"<[{number}]>", self.mark(after))))
        return json.dumps(text, ensure_ascii=False) if text else ""

    def free_until(self, marks: Iterable[str], excluded: str = "") -> str:
        """Any text up to the first of the marks, and the mark. The text does not begin with `excluded`."""
        text = self.text_without(excluded)
        options = {mark: "" if self.is_special(mark) else "[lazy]" for mark in marks}
        return self.any_of(self.rule(f"{text} {self.mark(mark)}", option) for mark, option in options.items())

    def string_until(self, close: str, schema: Mapping[str, Any], mark: str = "") -> str:
        """A string without quotes, of the length that a schema allows, and the text behind the string.

        The string does not contain the text behind it, even if that text is a special token, and no `mark`.
        """
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if not isinstance(least, int) or not isinstance(most, int | None):
            raise SchemaError("a string in a tool's schema has a length of a wrong type")
        text = f"(?s:.){{{least},{'' if most is None else most}}}"
        if not self.is_special(close):
            whole = self.regex(text + escaped(close))
            if mark:
                whole = self._terminal(f"{whole} & ~{self.regex(f'(?s:.*{escaped(mark)}.+)')}")
            return self.rule(whole, "[lazy]")
        name = self._terminal(f"{self.regex(text)} & ~{self.regex(f'(?s:.*{escaped(close)}.*)')}")
        return self.rule(f"{name} {self.mark(close)}")

    def _terminal(self, body: str) -> str:
        if body not in self._terminals:
            self._terminals[body] = f"TEXT{len(self._terminals)}"
            self._rules.append(f"{self._terminals[body]}: {body}")
        return self._terminals[body]

    def regex(self, expression: str) -> str:
        return "/" + expression.replace("/", "\\/").replace("\n", "\\n") + "/"

    def spaced(self, *parts: str) -> str:
        """Parts with optional whitespace between them. Empty parts are left out."""
        return f" {self.space()} ".join(filter(None, parts))

    def space(self) -> str:
        """Optional whitespace."""
        return self.rule(self.regex("[ \\n]{1,8}")) + "?"

    def json(self, schema: Any, root: Mapping[str, Any], *, is_strict: bool = False) -> str:
        """A value of a schema in JSON. `root` has the definitions for the schema's references. Raises SchemaError."""
        if schema != root and any(not text.startswith(("#/$defs/", "#/definitions/")) for text in _references(schema)):
            raise SchemaError("a reference ($ref) in a tool's schema names a part outside of its definitions")
        if isinstance(schema, Mapping):
            schema = {**{key: root[key] for key in _DEFINITIONS if key in root}, **schema}
        closes = is_strict or self._closes_objects
        read = read_schema(json.dumps(schema))
        for part, _ in schemas_in(read):
            for key in _NOTES:
                part.pop(key, None)
        rewritten, options = rewrite_schema(read, closes_objects=closes)
        try:
            rewritten = rewrite_numbers(rewritten)
        except NumberError:
            raise SchemaError("a tool's schema has a number that no double holds, which is not supported") from None
        return self.rule(f"%json {write_schema(rewritten | {'x-guidance': options})}")

    def arguments(self, tool: Tool) -> str:
        """A tool's arguments as an object of JSON. Raises SchemaError."""
        return self.json(object_schema(tool), tool.parameters, is_strict=tool.strict)


def object_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments. Without parameters, a tool has no arguments."""
    schema = dict(tool.parameters) or {"type": "object", "properties": {}}
    if schema.get("properties") == {} and not any(key in schema for key in ("anyOf", "oneOf", "allOf", "$ref")):
        schema.setdefault("additionalProperties", False)
    return schema


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(reference := node.get("$ref"), str):
            yield reference
        node = node.values()
    if not isinstance(node, str):
        for part in node if isinstance(node, Iterable) else ():
            yield from _references(part)


def escaped(text: str) -> str:
    """A regular expression for a text, in the syntax of Rust's regex crate."""
    return _META.sub(r"\\\g<0>", text).replace("\n", "\\n")
