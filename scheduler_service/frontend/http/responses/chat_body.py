"""Converts the fields of a response to those of a chat."""

from typing import Any

from scheduler_service.frontend.http.body import parse_part
from scheduler_service.frontend.http.errors import HttpError, invalid
from scheduler_service.frontend.http.openai.chat_fields import ChatFields, Function, NamedFunction, NamedTool, ToolField
from scheduler_service.frontend.http.openai.sampling_fields import JsonSchema, ResponseFormat
from scheduler_service.frontend.http.responses.fields import (
    AS_IN_CHATS,
    LOGPROBS,
    Format,
    FunctionChoice,
    FunctionTool,
    ResponseFields,
)

_NAMES = {
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "sampling.max_tokens": "max_output_tokens",
    "json_schema": "text.format",
    "messages": "input",
    "chat": "input",
}
"""Fields of a chat, and what a response calls them."""

_SAME = ("model", "user", "stream", "temperature", "top_p", *AS_IN_CHATS)


def chat_fields(fields: ResponseFields, messages: list[Any]) -> ChatFields:
    """The body of a chat with the same meaning. Raises HttpError."""
    if fields.top_logprobs and not fields.has_logprobs:
        raise invalid(f"top_logprobs needs {LOGPROBS!r} in include", "top_logprobs")
    tools = read_tools(fields)
    found = ChatFields(messages=messages, **{name: getattr(fields, name) for name in _SAME})
    found.max_completion_tokens = fields.max_output_tokens
    if fields.has_logprobs:
        found.logprobs, found.top_logprobs = True, fields.top_logprobs
    found.tool_choice = _choice(fields.tool_choice)
    found.parallel_tool_calls = fields.parallel_tool_calls
    if tools:
        found.tools = [ToolField(type="function", function=_function(tool)) for tool in tools]
    elif found.tool_choice in ("none", "auto"):
        found.tool_choice = None
    if fields.reasoning is not None:
        found.reasoning_effort = fields.reasoning.effort
    if fields.text is not None and fields.text.format is not None:
        found.response_format = _format(fields.text.format)
    return found


def read_tools(fields: ResponseFields) -> list[FunctionTool]:
    """The tools of a request. Raises HttpError."""
    found = []
    for number, tool in enumerate(fields.tools or ()):
        if (kind := tool.get("type")) != "function":
            reason = "this server runs no tools of its own, and calls functions of the client alone"
            raise invalid(f"tools[{number}].type is {str(kind)[:64]!r}; {reason}", "tools")
        found.append(parse_part(tool, FunctionTool, f"tools[{number}]"))
    return found


def as_asked(error: HttpError) -> HttpError:
    """The error of a chat, with the names of a response's fields."""
    said = error.body["error"]
    message, name = said["message"], said["param"]
    for old, new in _NAMES.items():
        starts = message.startswith((f"{old} ", f"{old}.", f"{old}[", f"{old}:"))
        if name == old or (name is None and (starts or ("." in old and old in message))):
            return HttpError(error.status, said["code"], message.replace(old, new, 1), new)
    return error


def _choice(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    if (kind := given.get("type")) != "function":
        raise invalid(f"tool_choice.type is {str(kind)[:64]!r}; it must be function", "tool_choice")
    named = parse_part(given, FunctionChoice, "tool_choice")
    return NamedTool(type="function", function=NamedFunction(name=named.name))


def _function(tool: FunctionTool) -> Function:
    return Function(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)


def _format(given: Format) -> ResponseFormat:
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    if "schema_" not in given.model_fields_set:
        raise invalid("text.format.schema is missing", "text.format")
    schema = JsonSchema.model_validate({"schema": given.schema_, "strict": given.strict})
    return ResponseFormat(type="json_schema", json_schema=schema)
