"""Rewrites the keys of objects in a JSON schema where llguidance would allow invalid outputs.

After a pattern that matches only named keys, llguidance would allow a comma without a key. These patterns are therefore
replaced by their keys: `{"patternProperties": {"^score$": …}}` becomes `{"properties": {"score": …}}`.

llguidance lets an output repeat an unnamed key, so a schema can require at most one. With unnamed keys, outputs may not
contain \\u escapes, which could spell a named key as an unnamed key: \\u0061 is the key "a".
"""

import json
import re
from collections.abc import Collection
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from pagewire_common.forms import parser_limits
from scheduler_service.frontend.forms.schema_text import SCHEMAS_BY_NAME, VALUES, SchemaError, path_to, schemas_in

ESCAPES = 'nrbtf\\"'
_CONTROL = re.compile(r"\\u00[01]|\x7f")
"""Control characters in JSON text that only a \\u escape can spell."""
_MAY_BE_CONTROL = re.compile(rf"{_CONTROL.pattern}|\\\\[xuUcav0-9pP]")
"""Regular expressions, in JSON text, that might match a control character."""
_NAMING = ("properties", "patternProperties", "required")

Trie = dict[int, "Trie"]
_END = -1


class KeyPatterns:
    """Finds the named keys that match a pattern (`patternProperties`), byte by byte."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer

    def list_keys(self, schema: Any) -> Any:
        """Replace each pattern that matches only named keys by the keys. Raises SchemaError."""
        _check_counts(schema)
        parts = [part for part, _ in schemas_in(schema)]
        if not any("patternProperties" in part for part in parts):
            return schema
        maps = [part["properties"] for part in parts if isinstance(part.get("properties"), dict)]
        return self._rewritten(schema, {name for properties in maps for name in properties})

    def _rewritten(self, node: Any, names: Collection[str], *, is_schema: bool = True) -> Any:
        if isinstance(node, list):
            return [self._rewritten(part, names) for part in node]
        if not isinstance(node, dict):
            return node
        found = {
            key: part
            if key in VALUES and is_schema
            else self._rewritten(part, names, is_schema=not is_schema or key not in SCHEMAS_BY_NAME)
            for key, part in node.items()
        }
        if not is_schema:
            return found
        patterns, properties = found.get("patternProperties"), found.get("properties", {})
        if not isinstance(patterns, dict) or not isinstance(properties, dict):
            return found
        found["patternProperties"], found["properties"] = patterns, properties = dict(patterns), dict(properties)
        for pattern, schema in list(patterns.items()):
            if keys := self._keys(pattern, names):
                del patterns[pattern]
                for key in keys:
                    properties[key] = {"allOf": [properties[key], schema]} if key in properties else schema
        return found

    def _keys(self, pattern: str, names: Collection[str]) -> list[str]:
        """All keys that match the pattern, in order of their bytes; empty if it also matches keys outside `names`."""
        grammar = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        trie: Trie = {}
        for name in names:
            node = trie
            for byte in json.dumps(name, ensure_ascii=False).encode():
                node = node.setdefault(byte, {})
            node[_END] = {}
        keys: list[str] = []
        prefix = bytearray()

        def follow(matcher: LLMatcher, node: Trie) -> bool:
            """Whether each match that begins with `prefix` continues as a name in `node`. Adds matching names to
            `keys`.
            """
            if matcher.is_stopped():
                keys.append(json.loads(prefix))
                return _END in node and not matcher.is_error()
            mask = matcher.compute_bitmask()
            for byte in range(256):
                if mask[byte // 8] >> byte % 8 & 1:
                    if byte not in node:
                        return False
                    after = matcher.deep_copy()
                    after.consume_token(byte)
                    prefix.append(byte)
                    if not follow(after, node[byte]):
                        return False
                    prefix.pop()
            return not matcher.is_error()

        return keys if follow(matcher, trie) else []


def _check_counts(schema: Any) -> None:
    """Raises SchemaError if `minProperties` exceeds the number of required keys by more than 1."""
    for part, path in schemas_in(schema):
        least, required = part.get("minProperties", 0), part.get("required", [])
        if isinstance(least, int) and isinstance(required, list) and least > len(required) + 1:
            raise SchemaError(
                f'{path_to(path, "minProperties")} is {least}, but outputs may repeat keys that are not "required": '
                "at most one more key can be required"
            )


def json_escapes(schema: Any) -> str:
    """The characters after a backslash that outputs of this schema may contain.

    Raises SchemaError if \\u escapes are forbidden, but the schema may have control characters that need them.
    """
    parts = [part for part, _ in schemas_in(schema)]
    if not any(key in part for part in parts for key in _NAMING if part.get("additionalProperties") is not False):
        return f"{ESCAPES}u"
    for part, path in schemas_in(schema):
        for key in ("const", "enum", "pattern", "patternProperties"):
            spelled = json.dumps(part.get(key), ensure_ascii=False, default=str)
            if key in part and (_CONTROL if key in VALUES else _MAY_BE_CONTROL).search(spelled):
                raise SchemaError(
                    f"{path_to(path, key)} may have control characters, which need objects without unnamed keys: "
                    'set "additionalProperties" to false in each'
                )
    return ESCAPES
