"""Grammars of calls with untyped arguments between tags. Patterns and formats of strings are not held."""

import json
from collections.abc import Mapping
from typing import Any

from scheduler_service.frontend.chat.grammar.lark import SPACE, Lark, escaped, object_schema
from scheduler_service.frontend.chat.syntax import Tagged
from scheduler_service.frontend.chat.tools import Tool, resolved
from scheduler_service.frontend.forms.schema_text import SchemaError


def tagged_call(lark: Lark, form: Tagged, tool: Tool) -> str:
    """A call with an argument for each property of the schema, in the schema's order."""
    schema = resolved(object_schema(tool), tool.parameters)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise SchemaError(f"the schema of the tool {tool.name!r} has properties or required keys of a wrong type")
    parts = [lark.regex(f"{escaped(form.open + tool.name + form.name_end)}{SPACE}")]
    for key, value in properties.items():
        argument = _argument(lark, form, escaped(key), value, tool)
        parts.append(argument if key in required else f"{argument}?")
    if not properties and schema.get("additionalProperties") is not False:
        parts.append(f"{_argument(lark, form, '[a-zA-Z0-9_-]{1,64}', {}, tool)}*")
    parts.append(lark.mark(form.close))
    return lark.rule(" ".join(parts))


def _argument(lark: Lark, form: Tagged, key: str, schema: Any, tool: Tool) -> str:
    line = "\n" if form.has_lines else ""
    opening = f"{escaped(form.key_open)}{key}{escaped(form.key_end)}{SPACE if form.value_open else ''}"
    opening = lark.regex(f"{opening}{escaped(form.value_open)}{line}")
    return lark.rule(f"{opening} {_value(lark, form, schema, tool)} {lark.rule(lark.regex(SPACE))}")


def _value(lark: Lark, form: Tagged, schema: Any, tool: Tool) -> str:
    close = f"\n{form.value_close}" if form.has_lines else form.value_close
    types = tool.types_in(schema)
    found = resolved(schema, tool.parameters)
    texts = [found["const"]] if "const" in found else found.get("enum")
    ending = json.dumps(close, ensure_ascii=False)
    if "string" not in types:
        return f"{lark.json(schema, tool.parameters, is_strict=tool.strict)} {ending}"
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        return f"{lark.any_of(json.dumps(text, ensure_ascii=False) for text in texts)} {ending}"
    return lark.string_until(close, found if types == {"string"} else {}, form.value_close if form.has_lines else "")
