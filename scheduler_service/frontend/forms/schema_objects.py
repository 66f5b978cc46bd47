"""Closes the objects of a JSON schema: in a closed object, outputs may only have keys that the schema names.

Several parts may describe the same value: the schema's own keywords, and its `allOf`, `anyOf`, `oneOf` and `$ref`. If
only one part names keys, this part is closed; if several do, the schema around them, with all their keys. An object
stays open if no part names keys, or if a part has `additionalProperties`.

The definition behind a `$ref` is closed, or copied if other parts describe the value. llguidance reads a recursive
`$ref` only without other keywords.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from scheduler_service.frontend.forms.schema_text import SCHEMAS_BY_NAME, VALUES, SchemaError, schemas_in, target_of

_PARTS = ("allOf", "anyOf", "oneOf")
_NAMES = ("properties", "patternProperties")
_SAYS_ITSELF = ("additionalProperties", "unevaluatedProperties")


def close_objects(schema: Any) -> Any:
    return _Closer(schema).closed() if isinstance(schema, dict) else schema


class _Closer:
    def __init__(self, schema: dict[str, Any]) -> None:
        self._root = schema
        self._has_ids = any("$id" in part for part, path in schemas_in(schema) if path != "#")
        self._copies: dict[str, str] = {}  # names of open copies of definitions, by `$ref`

    def closed(self) -> dict[str, Any]:
        found = self._value(self._root)
        if self._has_ids:  # a schema with ids is returned unchanged
            return self._root
        definitions: dict[str, Any] = {}
        while left := [reference for reference in self._copies if self._copies[reference] not in definitions]:
            for reference in left:
                definitions[self._copies[reference]] = self._part(target_of(self._root, reference))
        if definitions:
            found["$defs"] = found.get("$defs", {}) | definitions
        return found  # type: ignore[no-any-return]

    def _value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self._value(part) for part in node]
        if not isinstance(node, dict):
            return node
        groups = [key for key in (*_PARTS, "$ref") if key in node]
        has_own = any(key in node for key in (*_NAMES, *_SAYS_ITSELF))
        if not has_own and (len(groups) == 1 and (groups != ["allOf"] or len(node["allOf"]) == 1)):
            return self._with_children(node, is_closed=True)
        parts = [*self._parts(node, set())]
        naming = [part for part in parts if any(isinstance(part.get(key), dict) for key in _NAMES)]
        found = self._part(node)
        if not naming or any(key in part for part in parts for key in _SAYS_ITSELF):
            return found
        if self._has_ids:  # a `$ref` inside a part with `$id` cannot be redirected
            raise SchemaError('its objects cannot be closed, as a part has a "$id": say "additionalProperties" in each')
        required = [name for part in parts for name in part.get("required", ()) if isinstance(name, str)]
        names = {key: {name: True for part in naming for name in part.get(key, ())} for key in _NAMES}
        names["properties"] |= dict.fromkeys(required, True)
        if naming == [node]:
            for key in _NAMES:
                if more := {name: True for name in names[key] if name not in node.get(key, {})}:
                    found[key] = found.get(key, {}) | more
            return found | {"additionalProperties": False}
        found["allOf"] = [
            *found.get("allOf", []),
            names | {"additionalProperties": False},
        ]  # last in `allOf`, to keep the order of keys in outputs
        return found

    def _part(self, node: Any) -> Any:
        """Forbid undeclared keys in the objects inside one of several schemas for a value. The schema itself stays
        open.
        """
        return self._with_children(node, is_closed=False) if isinstance(node, dict) else node

    def _with_children(self, node: dict[str, Any], *, is_closed: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.items():
            if key == "patternProperties" and value == {}:
                continue  # without patterns it has no effect, but schema_grammar.py and llguidance may refuse it
            if key in VALUES:
                found[key] = value
            elif key in SCHEMAS_BY_NAME and isinstance(value, dict):
                found[key] = {name: self._value(part) for name, part in value.items()}
            elif key in _PARTS and isinstance(value, list) and not is_closed:
                found[key] = [self._part(part) for part in value]
            elif key == "$ref" and isinstance(value, str) and not is_closed:
                found[key] = f"#/$defs/{self._copies.setdefault(value, self._new_name())}"
            else:
                found[key] = self._value(value)
        return found

    def _new_name(self) -> str:
        taken = {*self._root.get("$defs", {}), *self._copies.values()}
        return next(name for number in itertools.count() if (name := f"open-{number}") not in taken)

    def _parts(self, node: Any, seen: set[str]) -> Iterator[dict[str, Any]]:
        """All parts that describe the same value as the schema `node`, each once."""
        if not isinstance(node, dict):
            return
        yield node
        for key in _PARTS:
            for part in node.get(key, ()):
                yield from self._parts(part, seen)
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            yield from self._parts(target_of(self._root, reference), seen)
