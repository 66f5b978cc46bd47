"""Grammars of calls whose arguments are written almost as in JSON: Python's literals, or marks around strings."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler_service.frontend.chat.grammar.lark import Lark, escaped, object_schema
from scheduler_service.frontend.chat.syntax import BracedCall
from scheduler_service.frontend.chat.tools import Tool, resolved
from scheduler_service.frontend.forms.schema_text import SchemaError

_MAX_DEPTH = 32
_NOTES = ("description", "title", "default", "examples", "nullable", "$defs", "definitions")
_TYPES = ("string", "number", "boolean", "null")


def python_call(lark: Lark, tool: Tool, before: str = "") -> str:
    """A call in Python; `before` stands directly before the name, as part of the same token of the grammar."""
    writer = _Writer(lark, tool, "", "=", ", ?")
    return lark.rule(f'{lark.regex(escaped(f"{before}{tool.name}("))} {writer.items(object_schema(tool), True, 0)} ")"')


def braced_call(lark: Lark, form: BracedCall, tool: Tool) -> str:
    """A call with arguments in braces."""
    writer = _Writer(lark, tool, form.quote, ":", ",")
    opening = json.dumps(f"{form.open}{tool.name}{{", ensure_ascii=False)
    return lark.rule(f'{opening} {writer.items(object_schema(tool), True, 0)} "}}"')


@dataclass(frozen=True, slots=True)
class _Writer:
    lark: Lark
    tool: Tool
    quote: str
    equals: str
    """The text between an argument's name and value."""
    comma: str

    def items(self, schema: Any, is_call: bool, depth: int) -> str:
        """The properties of an object, in the schema's order. The keys of a call have no quotes."""
        schema = resolved(schema, self.tool.parameters)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise SchemaError(f"the schema of the tool {self.tool.name!r} has properties of a wrong type")
        lark, comma = self.lark, self.lark.regex(self.comma)
        first = rest = lark.rule('""')
        for key, value in reversed(self._ordered(properties)):
            is_plain = is_call or self.quote
            name = escaped(key if is_plain else json.dumps(key, ensure_ascii=False))
            equals = self.equals if is_plain else ": ?"
            pair = lark.rule(f"{lark.regex(name + equals)} {self.value(value, depth + 1)}")
            is_required = key in required
            first = lark.rule(f"{pair} {rest}" if is_required else f"{pair} {rest} | {first}")
            rest = lark.rule(f"{comma} {pair} {rest}" if is_required else f"({comma} {pair})? {rest}")
        return first

    def _ordered(self, properties: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """The properties in the order in which the model's chat template writes them."""
        items = list(properties.items())
        return sorted(items, key=lambda item: item[0].lower()) if self.quote else items

    def value(self, schema: Any, depth: int) -> str:
        lark = self.lark
        if depth > _MAX_DEPTH:
            raise SchemaError(f"the schema of the tool {self.tool.name!r} is too deep, or refers to itself")
        schema = resolved(schema, self.tool.parameters)
        for key in ("const", "enum"):
            if key in schema:
                values = schema[key] if key == "enum" else [schema[key]]
                return lark.any_of(self._constant(value) for value in values)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return lark.any_of(self.value(part, depth + 1) for part in schema[key])
        kinds = ["object"] if "properties" in schema else ["array"] if "items" in schema else list(_TYPES)
        types = schema.get("type", kinds)
        types = [types] if isinstance(types, str) else list(types)
        if schema.get("nullable") is True:
            types.append("null")
        return lark.any_of(self._of_type(name, schema, depth) for name in types)

    def _of_type(self, name: str, schema: Mapping[str, Any], depth: int) -> str:
        lark = self.lark
        match name:
            case "null" | "boolean":
                return self._any_constant([None] if name == "null" else [True, False])
            case "array":
                item = self.value(schema.get("items", {}), depth + 1)
                return lark.rule(f'"[" {self._list(item, schema)} "]"')
            case "object":
                return lark.rule(f'"{{" {self.items(schema, False, depth)} "}}"')
            case "string" if self.quote:
                return lark.rule(f"{lark.mark(self.quote)} {lark.string_until(self.quote, schema)}")
        plain = {key: value for key, value in schema.items() if key not in _NOTES} | {"type": name}
        return lark.json(plain, self.tool.parameters)

    def _list(self, item: str, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(least, int) or not isinstance(most, int | None):
            raise SchemaError(f"the schema of the tool {self.tool.name!r} has a number of items of a wrong type")
        if most == 0:
            return ""
        more = f"({self.lark.regex(self.comma)} {item})"
        items = f"{item} {more}{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return items if least else f"({items})?"

    def _any_constant(self, values: Iterable[Any]) -> str:
        return self.lark.any_of(map(self._constant, values))

    def _constant(self, value: Any) -> str:
        lark = self.lark
        if isinstance(value, str) and self.quote:
            return lark.mark(f"{self.quote}{value}{self.quote}")
        if isinstance(value, list | dict):
            raise SchemaError(f"the schema of the tool {self.tool.name!r} has a list or an object as a constant")
        text = json.dumps(value, ensure_ascii=False)
        if not self.quote:
            text = {"true": "True", "false": "False", "null": "None"}.get(text, text)
        return json.dumps(text, ensure_ascii=False)
