"""Converts the fields of Anthropic's API to those of a chat."""

from typing import Any

from scheduler_service.frontend.http.anthropic.fields import CountFields, MessagesFields, Thinking, ToolFields
from scheduler_service.frontend.http.anthropic.history import read_messages
from scheduler_service.frontend.http.body import parse_part
from scheduler_service.frontend.http.chats.thinking import check_budget, thinking_fields
from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.images.image_reader import ImageReader
from scheduler_service.frontend.http.openai.chat_fields import ChatFields
from scheduler_service.frontend.model import ServedModel

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def chat_fields(fields: CountFields, model: ServedModel, images: ImageReader) -> ChatFields:
    """The fields of a chat with the same meaning. Large fields are emptied. Raises HttpError and RequestError."""
    messages = await read_messages(fields.system, fields.messages, images)
    given: dict[str, Any] = {
        "model": fields.model,
        "messages": messages,
        "continue_final_message": bool(messages) and messages[-1]["role"] == "assistant",
        **_tools(fields),
    }
    most = fields.max_tokens if isinstance(fields, MessagesFields) else None
    if fields.thinking is not None:
        given |= _thinking(fields.thinking, most, model)
    if (config := fields.output_config) is not None:
        if config.format is not None:
            form = {"type": "json_schema", "json_schema": {"schema": config.format.schema_}}
            given["response_format"] = form
        if config.effort is not None:
            _set_effort(given, config.effort, model)
    if isinstance(fields, MessagesFields):
        given |= {name: getattr(fields, name) for name in ("max_tokens", "temperature", "top_k", "top_p")}
        given["stop"] = fields.stop_sequences
    fields.messages, fields.system, fields.tools = [], None, None
    return parse_part(given, ChatFields, "")


def _tools(fields: CountFields) -> dict[str, Any]:
    tools, choice = fields.tools or [], fields.tool_choice
    if not tools:
        if choice is not None and choice.type not in ("auto", "none"):
            raise invalid(f"tool_choice is {choice.type}, and there are no tools", "tool_choice")
        return {}
    given: dict[str, Any] = {"tools": list(map(_tool, tools))}
    if choice is not None:
        if (choice.type == "tool") is (choice.name is None):
            raise invalid("tool_choice has a name if its type is tool, and only then", "tool_choice")
        named = {"type": "function", "function": {"name": choice.name}}
        given["tool_choice"] = _CHOICES.get(choice.type, named)
        given["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return given


def _tool(tool: ToolFields) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def _thinking(thinking: Thinking, most: int | None, model: ServedModel) -> dict[str, Any]:
    """`most`: the largest number of tokens of the answer; a larger budget needs no watch. Raises HttpError."""
    if (thinking.type == "enabled") is (thinking.budget_tokens is None):
        raise invalid("thinking has budget_tokens if its type is enabled, and only then", "thinking")
    found = thinking_fields("thinking", model, is_on=thinking.type != "disabled")
    if thinking.budget_tokens is not None:
        check_budget("thinking", model)
        if most is not None and thinking.budget_tokens < most:
            found["thinking_token_budget"] = thinking.budget_tokens
    found["include_reasoning"] = thinking.display != "omitted"
    return found


def _set_effort(given: dict[str, Any], effort: str, model: ServedModel) -> None:
    """Set the effort of a model that has levels of effort. Other models have the usual effort, `high`."""
    if model.tokenizer is not None and model.tokenizer.template_names("reasoning_effort"):
        given["reasoning_effort"] = effort
    elif effort != "high":
        reason = "the model's chat template has no levels of reasoning"
        raise invalid(f"output_config.effort is {effort}; {reason}", "output_config")
