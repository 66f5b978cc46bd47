"""A request's tools, and the JSON types that a tool's schema allows for each argument."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_MAX_DEPTH = 16
_ALL = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]*))(?:\.0+)?")
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class Tool:
    """A tool (function) of a request. `parameters` is the JSON schema of the arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def types_of(self, key: str) -> frozenset[str]:
        """The JSON types that the schema allows for an argument; all types if the schema names none."""
        properties = resolved(self.parameters, self.parameters).get("properties")
        return self.types_in(properties.get(key) if isinstance(properties, Mapping) else None)

    def types_in(self, schema: Any) -> frozenset[str]:
        """The JSON types that a part of the tool's schema allows; all types if the part names none."""
        return frozenset(_types(schema, self.parameters, 0)) or _ALL


def is_text(types: frozenset[str]) -> bool:
    """Whether every text is the value of an argument, and no text means another value."""
    return types == {"string"}


def typed_value(text: str, types: frozenset[str]) -> str:
    """The value of an untyped text as JSON, of the first type that fits; otherwise a string."""
    plain = text.strip()
    word = _OF_PYTHON.get(plain, plain)
    if word == "null" and "null" in types:
        return word
    if (word in ("true", "false") or word.lower() in ("true", "false")) and "boolean" in types:
        return word.lower()
    if "integer" in types and (whole := _WHOLE.fullmatch(plain)):
        return plain if "number" in types else whole[1]
    if "number" in types and _NUMBER.fullmatch(plain):
        return plain
    if plain[:1] in ("{", "[") and ("object" if plain[0] == "{" else "array") in types and _is_json(plain):
        return plain
    if types == _ALL and plain[:1] == '"' and _is_json(plain):
        return plain
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(name)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    schema = resolved(schema, root)
    if depth > _MAX_DEPTH or not schema:
        return
    declared = schema.get("type")
    if isinstance(declared, str | list):
        yield from _ALL.intersection([declared] if isinstance(declared, str) else map(str, declared))
        if schema.get("nullable") is True:
            yield "null"
        return
    for key in ("enum", "const"):
        if key in schema:
            values = schema[key] if key == "enum" and isinstance(schema[key], list) else [schema[key]]
            yield from map(_type_of, values)
            return
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list):
            for part in parts:
                yield from _types(part, root, depth + 1)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds: tuple[tuple[type, str], ...] = (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a chain of `$ref`s names; an empty schema if the chain leads nowhere."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        found: Any = root
        for name in reference.removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        schema = found
    return {}
