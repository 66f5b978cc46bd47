"""Grammars of calls with arguments in JSON."""

import json

from scheduler_service.frontend.chat.calls import channels
from scheduler_service.frontend.chat.grammar.lark import Lark, escaped
from scheduler_service.frontend.chat.syntax import JsonObject, NamedJson
from scheduler_service.frontend.chat.tools import Tool

_GAP = "[ \\n]{0,2}"


def json_object_call(lark: Lark, form: JsonObject, tool: Tool) -> str:
    """A call as an object of JSON."""
    number = f'"{escaped(form.id_key)}":{_GAP}"[0-9]{{1,3}}",{_GAP}' if form.writes_id else ""
    name = escaped(json.dumps(tool.name, ensure_ascii=False))
    head = f'\\{{{_GAP}{number}"{escaped(form.name_key)}":{_GAP}{name},{_GAP}"{escaped(form.arguments_key)}":{_GAP}'
    end = lark.regex(_GAP + r"\}")
    return lark.rule(f"{lark.regex(head)} {lark.arguments(tool)} {end}")


def named_json_call(lark: Lark, form: NamedJson, tool: Tool) -> str:
    """A call as a name and arguments in JSON."""
    name = json.dumps(form.prefix + tool.name, ensure_ascii=False)
    if form.is_numbered:
        name = lark.regex(f"{escaped(form.prefix + tool.name)}:[0-9]{{1,3}}")
    parts = (lark.mark(form.open), name, lark.mark(form.before_arguments), lark.arguments(tool), lark.mark(form.close))
    return lark.rule(" ".join(filter(None, parts)))


def channel_call(lark: Lark, tool: Tool) -> str:
    """A message to a tool, up to the token that ends the output."""
    header = f"{channels.CHANNEL}commentary to=functions.{tool.name} {channels.CONSTRAIN}json{channels.MESSAGE}"
    return lark.rule(f"{lark.mark(header)} {lark.arguments(tool)}")
