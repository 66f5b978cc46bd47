"""Reads a chat as the variables of a chat template, with marks in place of special tokens (chat_marks.py)."""

from collections.abc import Collection
from typing import Any

from scheduler_service.frontend.rendering.bounded_json import Values, parse
from scheduler_service.frontend.rendering.chat_input import RawChat
from scheduler_service.frontend.rendering.chat_marks import ChatMarks
from scheduler_service.frontend.rendering.chat_template import ChatTemplate
from scheduler_service.frontend.rendering.content import ContentReader, content_forms
from scheduler_service.frontend.rendering.encoding_errors import TemplateError
from scheduler_service.frontend.rendering.tool_arguments import read_calls

MAX_TOOLS = 1024
"""Largest number of tools, and of documents."""
SET_BY_FIELDS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""Variables that `template_arguments` may not set."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_PROBE = "\N{EM SPACE}"
"""White space behind the mark at the end of the last message: the white space is gone if the template trims content."""


def read_chat(chat: RawChat, template: ChatTemplate, marks: ChatMarks) -> dict[str, Any]:
    """The variables of the chat template. Raises TemplateError and TooManyTokensError."""
    raw_messages, tools, documents, arguments, adds_generation_prompt, continues, parses, placeholder, item_type = chat
    values = Values(str if parses else marks.hide)
    contents = ContentReader(content_forms(template), marks, placeholder, item_type, parses_special_tokens=parses)
    messages = []
    for position, (role, content, fields) in enumerate(raw_messages):
        message = {"role": role, "content": contents.read(f"chat.messages[{position}]", content)}
        if fields:
            message |= _fields(f"chat.messages[{position}]", fields, values)
        messages.append(message)
    if continues:
        _mark_the_end(messages[-1], marks)
    variables = _arguments(arguments, template, values) if arguments else {}
    return variables | {
        "messages": messages,
        "tools": _objects("chat.tools", tools, values) if tools else None,
        "documents": _objects("chat.documents", documents, values) if documents else None,
        "add_generation_prompt": adds_generation_prompt,
    }


def cut_at_the_end(text: str, marks: ChatMarks) -> str:
    """Cut a rendered chat behind the content that the output continues. Raises TemplateError."""
    end = text.rfind(marks.last)
    if end < 0:
        raise TemplateError(
            "chat.continue_final_message is true, and the model's chat template does not write the end of the last "
            "message's content"
        )
    kept = text[:end] if text.startswith(_PROBE, end + len(marks.last)) else text[:end].rstrip()
    return kept.replace(marks.last + _PROBE, "").replace(marks.last, "")  # a template may repeat the content


def _fields(place: str, text: str, values: Values) -> dict[str, Any]:
    fields = _parsed_object(f"{place}.fields", text)
    for name in ("role", "content"):
        if name in fields:
            raise TemplateError(f"{place}.fields sets {name}, which is a field of the message")
    if fields.get("tool_calls"):
        read_calls(f"{place}.tool_calls", fields["tool_calls"], values)
    copied: dict[str, Any] = values.copy(f"{place}.fields", fields)
    reasoning = next((copied[name] for name in _REASONING if copied.get(name) is not None), None)
    if reasoning is not None:
        return {"thinking": reasoning, **copied, "reasoning_content": reasoning}
    return copied


def _arguments(text: str, template: ChatTemplate, values: Values) -> dict[str, Any]:
    name = "chat.template_arguments"
    arguments = _parsed_object(name, text)
    reserved = (*SET_BY_FIELDS, *template.variables)
    _refuse(name, [key for key in arguments if key in reserved], "other fields or the model's files set")
    if arguments:
        unknown = [key for key in arguments if key not in template.names]
        known = sorted(template.names.difference(reserved))
        advice = f"it reads {', '.join(known[:20])}" if known else "it reads none"
        _refuse(name, unknown, f"the model's chat template does not read ({advice})")
    copied: dict[str, Any] = values.copy(name, arguments)
    return copied


def _refuse(name: str, keys: Collection[str], reason: str) -> None:
    for key in keys:
        raise TemplateError(f"{name} sets {key[:64]!r}, a variable that {reason}")


def _objects(name: str, text: str, values: Values) -> list[Any] | None:
    """Read a list of objects. An empty list counts as none, because some templates announce an empty list of tools."""
    objects = parse(name, text)
    if not isinstance(objects, list):
        raise TemplateError(f"{name} is no JSON list")
    if len(objects) > MAX_TOOLS:
        raise TemplateError(f"{name} has {len(objects)} entries; at most {MAX_TOOLS} are allowed")
    for position, value in enumerate(objects):
        if not isinstance(value, dict):
            raise TemplateError(f"{name}[{position}] is no JSON object")
    copied: list[Any] = values.copy(name, objects)
    return copied or None


def _parsed_object(name: str, text: str) -> dict[str, Any]:
    value = parse(name, text)
    if not isinstance(value, dict):
        raise TemplateError(f"{name} is no JSON object")
    return value


def _mark_the_end(message: dict[str, Any], marks: ChatMarks) -> None:
    if message.get("tool_calls"):
        raise TemplateError("chat.continue_final_message is true, and the last message has tool_calls")
    end = marks.last + _PROBE
    if isinstance(content := message["content"], str):
        message["content"] = content + end
    else:
        content[-1]["text"] += end  # the last part is a text
