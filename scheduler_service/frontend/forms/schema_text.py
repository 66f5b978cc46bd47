"""Parses a JSON schema with exact numbers, and writes a schema for llguidance, which reads numbers as doubles."""

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

MAX_DIGITS = 400
"""Digits of a number in a schema. The largest double has 309 before the decimal point."""

SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
ANNOTATIONS = ("default", "example", "examples")
"""Keywords whose values have no effect on outputs."""
VALUES = ("const", "enum", *ANNOTATIONS)
"""Keywords whose values are plain JSON values, not schemas."""


class SchemaError(ValueError):
    """The JSON schema is not supported. The message names the keyword and its place in the schema."""


def read_schema(text: str) -> Any:
    """Parse a JSON schema; its numbers become `int` or `Decimal`. Raises SchemaError."""
    try:
        return json.loads(
            text,
            parse_int=_integer,
            parse_float=_decimal,
            parse_constant=_no_number,
            object_pairs_hook=_without_repeats,
        )
    except json.JSONDecodeError as error:
        raise SchemaError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None


def write_schema(schema: Any) -> str:
    """Write a schema, in which each `Decimal` equals a double. Raises SchemaError."""
    written = json.dumps(schema, default=_double, ensure_ascii=False)
    if any("\ud800" <= character <= "\udfff" for character in written):
        raise SchemaError("it has a text with half of a surrogate pair (\\ud800 to \\udfff)")
    return written


def _double(value: Decimal) -> float:
    if math.isinf(found := float(value)):
        raise SchemaError(f"it has the number {value:.4g}, which is beyond the largest double")
    return found


def path_to(path: str, *names: object) -> str:
    """The JSON pointer to the part with these names or indices below `path`."""
    return "/".join([path, *(str(name).replace("~", "~0").replace("/", "~1") for name in names)])


def target_of(schema: Any, reference: str) -> Any:
    """The part of a schema that a `$ref` names. Raises SchemaError."""
    found = schema
    try:
        start, *names = unquote(reference).split("/")
        if start != "#":
            raise LookupError
        for name in names:
            key = name.replace("~1", "/").replace("~0", "~")
            found = found[int(key) if isinstance(found, list) else key]
    except (AttributeError, LookupError, ValueError, TypeError):
        raise SchemaError(f'"$ref" is {str(reference)[:100]}, and no "#/…" in the schema is called so') from None
    return found


def schemas_in(node: Any, path: str = "#", *, is_schema: bool = True) -> Iterator[tuple[dict[str, Any], str]]:
    """All objects in a JSON schema that stand where a schema is expected, each with its path."""
    if isinstance(node, list):
        for number, part in enumerate(node):
            yield from schemas_in(part, path_to(path, number))
    elif isinstance(node, dict):
        if is_schema:
            yield node, path
        for key, part in node.items():
            if not is_schema or not (key in VALUES or key.startswith("x-")):
                yield from schemas_in(part, path_to(path, key), is_schema=not is_schema or key not in SCHEMAS_BY_NAME)


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise SchemaError(f"it has a number of {len(digits)} digits; at most {MAX_DIGITS} are allowed")
    return int(digits)


def _decimal(digits: str) -> Decimal:
    value = Decimal(digits)
    if len(digits) > MAX_DIGITS or (value and abs(value.adjusted()) > MAX_DIGITS):
        raise SchemaError(f"it has the number {digits[:20]}…; at most {MAX_DIGITS} digits are allowed")
    return value


def _no_number(name: str) -> None:
    raise SchemaError(f"it is not JSON: {name} is no number of JSON")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in found if names.count(name) > 1)
        raise SchemaError(f"an object in it has the key {json.dumps(repeated)} twice")
    return found
