"""Finds endless recursion in a JSON schema, whose outputs could never end.

An output can end if all required parts can: the targets of `$ref` and `allOf`, one alternative of `anyOf` or `oneOf`,
and required keys and items. Contradictions are not detected.
"""

from typing import Any

from scheduler_service.frontend.forms.schema_text import SchemaError, path_to, schemas_in, target_of


def check_ends(schema: Any) -> None:
    """Raises SchemaError for a `$ref` that leads back to itself on every path."""
    parts = [*schemas_in(schema)]
    if not any("$ref" in part for part, _ in parts):
        return
    left, ending = parts[::-1], set[int]()  # parts come before the schema that contains them
    while True:
        still = []
        for part, path in left:
            if _may_end(schema, part, ending):
                ending.add(id(part))
            else:
                still.append((part, path))
        if len(still) == len(left):
            break
        left = still
    for part, path in left:
        if "$ref" in part:
            raise SchemaError(f"{path_to(path, '$ref')} leads back to itself, so that no output could end")


def _may_end(schema: Any, part: dict[str, Any], ending: set[int]) -> bool:
    def may(node: Any) -> bool:
        return not isinstance(node, dict) or id(node) in ending

    reference = part.get("$ref", "")
    is_inside = isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
    if is_inside and not may(target_of(schema, reference)):
        return False
    if not all(may(node) for node in _list(part.get("allOf"))):
        return False
    for key in ("anyOf", "oneOf"):
        if (nodes := _list(part.get(key))) and not any(map(may, nodes)):
            return False
    if part.get("type") == "object":
        others, properties = part.get("additionalProperties"), part.get("properties")
        named = properties if isinstance(properties, dict) else {}
        required = [name for name in _list(part.get("required")) if isinstance(name, str)]
        demanded = [named.get(name, others) for name in required]
        if isinstance(least := part.get("minProperties"), int) and least > len(named):
            demanded.append(others)
        return all(map(may, demanded))
    if part.get("type") == "array" and isinstance(least := part.get("minItems"), int):
        first = _list(part.get("prefixItems"))[:least]
        return all(map(may, first)) and (least <= len(first) or may(part.get("items")))
    return True


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
