"""Writes a grammar in Lark's syntax for a JSON schema with integers that no double holds exactly, such as ids.

Large values become literals, ranges regular expressions over digits, and the parts around them rules. Other parts stay
JSON schemas in the grammar.
"""

import json
import math
from collections.abc import Iterable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from scheduler_service.frontend.forms.integer_ranges import integers_between
from scheduler_service.frontend.forms.schema_numbers import NumberError, rewrite_numbers
from scheduler_service.frontend.forms.schema_text import ANNOTATIONS, SchemaError, path_to, target_of, write_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_TYPES = {
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "array": ("items", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}
_NOTES = ("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "deprecated", "discriminator",
          "readOnly", "writeOnly", *ANNOTATIONS)  # fmt: skip
MAX_RULES = 20_000


def schema_grammar(schema: Any, options: "JsonCompileOptions") -> str:
    """The grammar of a schema. Raises SchemaError for an unsupported keyword around large numbers."""
    return _Writer(schema, options).grammar()


class _Writer:
    def __init__(self, schema: Any, options: "JsonCompileOptions") -> None:
        self._root, self._options = schema, options
        self._references: dict[str, str] = {}
        self._rules = [
            '%llguidance {"ignore_once": true}',
            f"%ignore /{options['whitespace_pattern']}/",
            r'TEXT: /"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"/',
        ]

    def grammar(self) -> str:
        start = self._schema(self._root, "#")
        return "\n".join([*self._rules, f"start: {start}"])

    def _rule(self, body: str, *, is_terminal: bool = False) -> str:
        name = f"{'N' if is_terminal else 'n'}{len(self._rules)}"
        if len(self._rules) > MAX_RULES:
            raise SchemaError("it is too large for a schema with numbers that no double holds")
        self._rules.append(f"{name}: {body}")
        return name

    def _json(self, schema: Any) -> str:
        schema = rewrite_numbers(schema)
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        return self._rule(f"%json {write_schema(schema | {'x-guidance': self._options})}")

    def _schema(self, node: Any, path: str) -> str:
        if "$ref" not in json.dumps(node, default=str):
            try:
                return self._json(node)
            except NumberError:
                pass
        types = node.get("type", _TYPES)
        types = [types] if isinstance(types, str) else list(types)
        notes = _NOTES if "string" in types else (*_NOTES, "format")
        keywords = [key for key in node if not (key in notes or key.startswith("x-"))]
        keywords = [key for key in keywords if key != "patternProperties" or node[key] != {}]
        if keywords == ["$ref"]:
            return self._reference(node["$ref"])
        if keywords == ["anyOf"] or (keywords == ["allOf"] and len(node["allOf"]) == 1):
            parts = enumerate(node[keywords[0]])
            return self._any(self._schema(part, path_to(path, keywords[0], number)) for number, part in parts)
        for key in ("const", "enum"):
            if key in node:
                self._check(keywords, (key, "type"), path)
                values = [node[key]] if key == "const" else node[key]
                fitting = [value for value in values if any(_is_of(value, name) for name in types)]
                return self._any(self._value(value, path_to(path, key)) for value in fitting)
        self._check(keywords, ("type", *(key for name in types for key in _OF_TYPES.get(name, ()))), path)
        return self._any(
            self._of_type(name, node, path) for name in types if name != "integer" or "number" not in types
        )

    def _any(self, parts: Iterable[str]) -> str:
        found = list(dict.fromkeys(parts))
        if not found:
            raise SchemaError("none of its alternatives is possible")
        return found[0] if len(found) == 1 else self._rule(" | ".join(found))

    def _check(self, keywords: Iterable[str], known: Iterable[str], path: str) -> None:
        for key in keywords:
            if key not in known:
                raise SchemaError(
                    f"{path_to(path, key)} is not supported next to or around a number that no double holds, such as "
                    "an integer beyond 2^53"
                )

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            name = self._references[reference] = self._rule("")
            place = int(name[1:])
            body = self._schema(target_of(self._root, reference), reference)
            self._rules[place] = f"{name}: {body}"
        return self._references[reference]

    def _of_type(self, name: str, node: dict[str, Any], path: str) -> str:
        part = {"type": name, **{key: node[key] for key in _OF_TYPES.get(name, ()) if key in node}}
        if name == "integer":
            return self._rule(f"/{_integers(part, path)}/", is_terminal=True)
        if name == "array":
            return self._array(part, path)
        if name == "object":
            return self._object(part, path)
        return self._json(part)

    def _value(self, value: Any, path: str) -> str:
        if isinstance(value, list):
            items = ' "," '.join(self._value(item, path) for item in value)
            return self._rule(f'"[" {items} "]"')
        if isinstance(value, dict):
            pairs = ' "," '.join(f'{_key(key)} ":" {self._value(item, path)}' for key, item in value.items())
            return self._rule(f'"{{" {pairs} "}}"')
        if isinstance(value, int | Decimal) and not isinstance(value, bool):
            return self._rule(_literal(format(value, "f" if isinstance(value, Decimal) else "d")), is_terminal=True)
        return self._json({"const": value})

    def _array(self, node: dict[str, Any], path: str) -> str:
        least, most = node.get("minItems", 0), node.get("maxItems")
        if node.get("items") is False:
            most = 0
        if most is not None and least > most:
            raise SchemaError(f"{path_to(path, 'minItems')} is {least}, and at most {most} are possible")
        if most == 0:
            return self._rule('"[" "]"')
        item = self._schema(node.get("items", True), path_to(path, "items"))
        items = item if most == 1 else f'{item} ("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return self._rule(f'"[" {items} "]"' if least else f'"[" ({items})? "]"')

    def _object(self, node: dict[str, Any], path: str) -> str:
        """Add rules for an object: named keys in the schema's order, then other keys."""
        others = node.get("additionalProperties", True)
        required = node.get("required", [])
        properties = dict(node.get("properties", {}))
        where = {name: path_to(path, "properties", name) for name in properties}
        for name in required:
            properties.setdefault(name, others)
        first = rest = ""
        if others is not False:
            value = self._schema(others, path_to(path, "additionalProperties"))
            taken = " | ".join(_key(name) for name in properties)
            key = self._rule(f"TEXT & ~({taken})" if taken else "TEXT", is_terminal=True)
            pair = self._rule(f'{key} ":" {value}')
            rest = self._rule(f'("," {pair})*')
            first = self._rule(f"({pair} {rest})?")
        for name, schema in reversed(properties.items()):
            is_required = name in required
            if schema is False:
                if is_required:
                    raise SchemaError(f"{path_to(path, 'required')} has a key that is not allowed: {name[:100]}")
                continue
            value = self._schema(schema, where.get(name, path_to(path, "additionalProperties")))
            pair = self._rule(f'{_key(name)} ":" {value}')
            first = self._rule(f"{pair} {rest}" if is_required else f"{pair} {rest} | {first}")
            rest = self._rule(f'"," {pair} {rest}' if is_required else f'("," {pair})? {rest}')
        return self._rule(f'"{{" {first} "}}"')


def _is_of(value: Any, name: str) -> bool:
    is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    return {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "integer": is_number and value == math.floor(value),
        "number": is_number,
        "string": isinstance(value, str),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }.get(name, False)


def _integers(node: dict[str, Any], path: str) -> str:
    low = [math.ceil(node[key]) for key in ("minimum",) if key in node]
    low += [math.floor(node[key]) + 1 for key in ("exclusiveMinimum",) if key in node]
    high = [math.floor(node[key]) for key in ("maximum",) if key in node]
    high += [math.ceil(node[key]) - 1 for key in ("exclusiveMaximum",) if key in node]
    first, last = max(low, default=None), min(high, default=None)
    if first is not None and last is not None and first > last:
        raise SchemaError(f"{path} has bounds with no integer between them")
    return integers_between(first, last)


def _key(name: str) -> str:
    return _literal(json.dumps(name, ensure_ascii=False))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
