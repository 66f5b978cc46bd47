"""Reads a model's own `response_template` (tokenizer_config.json), the declarative format of transformers.

Calls in JSON between literal marks are read from the template itself. Calls in other forms, which a response template
describes by regular expressions, are told by the marks in these expressions, with the table of families.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from scheduler_service.frontend.chat.families import family_of
from scheduler_service.frontend.chat.syntax import ChatSyntax, JsonObject, Marks, Section

_REASONING = ("thinking", "reasoning_content", "reasoning")
_ESCAPED = re.compile(r"\\([^\w\s])")
_NAMES = re.compile(r"\{(?:content\.)?(\w+)\}")


def read_response_template(template: Mapping[str, Any]) -> ChatSyntax | None:
    """The syntax that a response template describes; None if the template says nothing that is known here."""
    fields = template.get("fields")
    if not isinstance(fields, Mapping):
        return None
    found = {name: value for name, value in fields.items() if isinstance(value, Mapping)}
    literals = " ".join(_ESCAPED.sub(r"\1", text) for text in _texts(found))
    family = family_of(literals)
    if family is not None and family.has_channels:
        return family
    reasoning = next((marks for name in _REASONING if (marks := _marks(found.get(name)))), None)
    if reasoning is None and family is not None:
        reasoning = family.reasoning
    calls = found.get("tool_calls")
    drops = tuple(_literals(found.get("content"), "open") + _literals(found.get("content"), "close"))
    if calls is None:
        return ChatSyntax("response-template", reasoning, drops=drops) if reasoning else None
    if calls.get("content") == "json" and (opens := _literals(calls, "open")):
        close = (_literals(calls, "close") or [""])[0]
        is_list = calls.get("transform_each") is True
        section = Section(tuple(opens), close, is_single=True)
        if is_list:
            section = Section(tuple(opens), close, "[", ",", "]")
        return ChatSyntax("response-template", reasoning, section, _form(calls), drops)
    if family is None or family.call is None:
        return None
    return ChatSyntax(
        family.family,
        reasoning,
        family.section,
        family.call,
        (*family.drops, *drops),
        family.arguments_as_objects,
        family.call_id,
    )


def _form(calls: Mapping[str, Any]) -> JsonObject:
    """The keys of a call's object: a transform names the keys in placeholders."""
    function = calls.get("transform")
    function = function.get("function") if isinstance(function, Mapping) else None
    keys: list[str] = []
    for key in ("name", "arguments"):
        value = function.get(key) if isinstance(function, Mapping) else None
        match = _NAMES.fullmatch(value) if isinstance(value, str) else None
        keys.append(match[1] if match else key)
    return JsonObject(keys[0], keys[1])


def _marks(field: Mapping[str, Any] | None) -> Marks | None:
    opens, closes = _literals(field, "open"), _literals(field, "close")
    if not opens and field and "<think>" in json.dumps(field.get("open_pattern", "")):
        opens = ["<think>"]
    return Marks(opens[0], closes[0]) if opens and closes else None


def _literals(field: Mapping[str, Any] | None, key: str) -> list[str]:
    value = field.get(key) if field else None
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str) and text]


def _texts(value: Any, depth: int = 0) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts(part, depth + 1)] if depth < 8 else []
