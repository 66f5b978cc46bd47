"""Rewrites tagged alternatives in a JSON schema, such as pydantic's unions with a discriminator.

A tag is a key with different values (`const`, `enum`) in each alternative. The rewritten schema has `anyOf` in place of
`oneOf`, and requires the tag, which llguidance needs to distinguish the alternatives.
"""

from typing import Any

from scheduler_service.frontend.forms.schema_text import SchemaError, schemas_in, target_of

_NOTES = ("title", "description", "discriminator", "default", "$comment")


def tag_unions(schema: Any) -> None:
    for part, _ in schemas_in(schema):
        if not isinstance(part.get("oneOf"), list) or "anyOf" in part:
            continue
        alternatives = [_objects(schema, alternative, ()) for alternative in part["oneOf"]]
        if (tag := _tag(alternatives)) is not None:
            for found in alternatives:
                for described in found:
                    described["required"] = list(dict.fromkeys([*described.get("required", []), tag]))
            part["anyOf"] = part.pop("oneOf")


def _objects(schema: Any, node: Any, seen: tuple[int, ...]) -> list[dict[str, Any]]:
    """The object schemas of a `oneOf` alternative; empty if it also allows other values."""
    if not isinstance(node, dict) or id(node) in seen:
        return []
    keywords = [key for key in node if key not in _NOTES]
    if keywords == ["$ref"]:
        try:
            return _objects(schema, target_of(schema, node["$ref"]), (*seen, id(node)))
        except SchemaError:
            return []
    if len(keywords) == 1 and keywords[0] in ("oneOf", "anyOf") and isinstance(node[keywords[0]], list):
        parts = [_objects(schema, part, (*seen, id(node))) for part in node[keywords[0]]]
        return [described for part in parts for described in part] if all(parts) else []
    is_object = node.get("type") == "object" and isinstance(node.get("properties"), dict)
    return [node] if is_object and isinstance(node.get("required", []), list) else []


def _tag(alternatives: list[list[dict[str, Any]]]) -> str | None:
    """The first key whose values every alternative lists, and no two share."""
    if not alternatives or not all(alternatives):
        return None
    for key in alternatives[0][0]["properties"]:
        values = [{value for described in found for value in _values(described, key)} for found in alternatives]
        has_all = all(_values(described, key) for found in alternatives for described in found)
        if has_all and sum(map(len, values)) == len(set().union(*values)):
            return str(key)
    return None


def _values(described: dict[str, Any], key: str) -> list[str]:
    """The strings that a schema allows as the value of `key`; empty if it also allows other values."""
    part = described["properties"].get(key)
    if not isinstance(part, dict):
        return []
    values = [part["const"]] if "const" in part else part.get("enum", [])
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else []
