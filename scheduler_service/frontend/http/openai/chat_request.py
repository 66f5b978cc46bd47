"""Converts the body of a chat to a request of InferenceService."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.calls.generation import ChatOutput
from scheduler_service.frontend.chat.calls import channels
from scheduler_service.frontend.chat.families import HERMES
from scheduler_service.frontend.chat.parser import closes_reasoning, opens_reasoning
from scheduler_service.frontend.chat.plain_tools import write_out_tools
from scheduler_service.frontend.chat.syntax import ChatSyntax
from scheduler_service.frontend.chat.tool_grammar import Choice
from scheduler_service.frontend.chat.tool_grammars import ToolGrammars
from scheduler_service.frontend.chat.tools import Tool
from scheduler_service.frontend.checking.checks import require_tokenizer
from scheduler_service.frontend.forms.forms import FormError
from scheduler_service.frontend.http.chats.json_values import json_text
from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.images.image_reader import ImageReader
from scheduler_service.frontend.http.openai.chat_fields import ChatFields, NamedTool, ToolField, chat_params
from scheduler_service.frontend.http.openai.history import read_history
from scheduler_service.frontend.http.openai.sampling_fields import kept_tokens
from scheduler_service.frontend.http.service import ChatRequest, Service
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.text.output_text import ReasoningMarks
from scheduler_service.frontend.text.tokenization import Tokenizer

NO_SYNTAX = ChatSyntax("plain")


@dataclass(frozen=True, slots=True)
class _Tools:
    """The tools that the model may call. `choice`: whether it must call one. `named`: the only tool, or ""."""

    tools: list[Tool]
    choice: Choice = "none"
    named: str = ""


async def chat_request(
    fields: ChatFields,
    model: ServedModel,
    adapter: str,
    request_id: str,
    service: Service,
    images: ImageReader,
    *,
    fits_max_tokens: bool = False,
) -> ChatRequest:
    """The request of a chat. Fields that were read are emptied. Raises HttpError and RequestError.

    `fits_max_tokens`: `max_tokens` beyond the context is lowered.
    """
    tokenizer = require_tokenizer("messages", model)
    found = _read_tools(fields)
    chat = await read_history(fields.messages, tokenizer.template_names, images)
    fields.messages = []
    if found.tools:
        chat.tools = json_text("tools", [tool.model_dump(exclude_none=True) for tool in fields.tools or ()])
    if fields.documents:
        chat.documents = json_text("documents", fields.documents)
    arguments = _template_arguments(fields, tokenizer)
    chat.template_arguments = json_text("chat_template_kwargs", arguments) if arguments else ""
    chat.continue_final_message = fields.continue_final_message
    if fields.add_generation_prompt is not None:
        chat.add_generation_prompt = fields.add_generation_prompt
    syntax = model.chat_syntax or NO_SYNTAX
    if _uses_tools(chat) and not (syntax.has_calls and tokenizer.template_names("tools")):
        write_out_tools(chat)
        syntax = replace(HERMES, reasoning=syntax.reasoning)
    sampling = chat_params(fields, model)
    fields.tools = fields.documents = fields.chat_template_kwargs = None
    thinks = arguments.get("enable_thinking") is not False
    make_form = _form_maker(fields, model, found, syntax, sampling, service, thinks=thinks)
    drops_special = fields.skip_special_tokens is not False and syntax.needs_special_tokens(tokenizer.special_tokens)
    if drops_special:
        sampling.skip_special_tokens = False
    asked = pb.GenerateRequest(
        request_id=fields.request_id or request_id,
        chat=chat,
        parse_special_tokens=fields.parse_special_tokens,
        sampling=sampling,
        priority=fields.priority,
        cache_salt=fields.cache_salt,
        truncate_prompt_tokens=kept_tokens(fields, sampling, model),
        lora_name=adapter,
    )
    output = ChatOutput(make_form, partial(_reasoning_marks, syntax), fits_max_tokens)
    return ChatRequest(asked, syntax, found.tools, output, drops_special=drops_special)


def _reasoning_marks(syntax: ChatSyntax, prompt_end: str) -> ReasoningMarks | None:
    if syntax.has_channels:
        return ReasoningMarks(f"{channels.CHANNEL}analysis{channels.MESSAGE}", channels.ENDS[0])
    if (marks := syntax.reasoning) is None:
        return None
    return ReasoningMarks(marks.open.strip(), marks.close.strip(), is_open=opens_reasoning(syntax, prompt_end))


def _uses_tools(chat: pb.Chat) -> bool:
    return bool(chat.tools) or any(
        message.role == "tool" or '"tool_calls"' in message.fields for message in chat.messages
    )


def _read_tools(fields: ChatFields) -> _Tools:
    """Read `tools` and `tool_choice`. With `none`, the model does not learn of the tools. Raises HttpError."""
    given = fields.tools or []
    names = [tool.function.name for tool in given]
    if len({*names}) < len(names):
        raise invalid("two tools have the same name", "tools")
    if fields.parallel_tool_calls is not None and not given:
        raise invalid("parallel_tool_calls needs tools", "parallel_tool_calls")
    if isinstance(fields.tool_choice, NamedTool):
        named = fields.tool_choice.function.name
        if named not in names:
            raise invalid(f"tool_choice names {named[:64]!r}, which is not among tools", "tool_choice")
        return _Tools(list(map(_tool, given)), "required", named)
    choice = fields.tool_choice or ("auto" if given else "none")
    if choice != "none" and not given:
        raise invalid(f"tool_choice is {choice}, and there are no tools", "tool_choice")
    return _Tools([] if choice == "none" else list(map(_tool, given)), choice)


def _tool(given: ToolField) -> Tool:
    function = given.function
    return Tool(function.name, function.parameters or {}, function.strict is True)


def _template_arguments(fields: ChatFields, tokenizer: Tokenizer) -> dict[str, Any]:
    """The further variables of the chat template. Raises HttpError."""
    arguments: dict[str, Any] = dict(fields.chat_template_kwargs or {})
    if arguments.get("enable_thinking") is False and not tokenizer.template_names("enable_thinking"):
        del arguments["enable_thinking"]  # a template without thinking never thinks
    if (effort := fields.reasoning_effort) is not None:
        if tokenizer.template_names("reasoning_effort"):
            arguments.setdefault("reasoning_effort", effort)
        elif tokenizer.template_names("enable_thinking"):
            arguments.setdefault("enable_thinking", effort not in ("none", "minimal"))
        elif effort != "none":
            reason = "the model's chat template has no levels of reasoning"
            raise invalid(f"reasoning_effort is {effort!r}; {reason}", "reasoning_effort")
    return arguments


def _form_maker(
    fields: ChatFields,
    model: ServedModel,
    found: _Tools,
    syntax: ChatSyntax,
    sampling: pb.SamplingParams,
    service: Service,
    *,
    thinks: bool,
) -> Callable[[str], Awaitable[str]] | None:
    """A function that compiles the form of a message with tool calls, or of an answer behind reasoning.

    Calls are not held to their schemas under `auto` where forms are impossible. `thinks`: the request has not turned
    thinking off. Raises HttpError.
    """
    kind, budget = sampling.WhichOneof("constraint"), fields.thinking_token_budget
    has_form = kind is not None and bool(found.tools or syntax.reasoning or syntax.has_channels)
    if budget is not None and syntax.reasoning is None:
        raise invalid(
            "thinking_token_budget: the model's chat template has no known reasoning", "thinking_token_budget"
        )
    if not found.tools and not has_form and budget is None:
        return None
    if found.tools and kind not in (None, "json_schema"):
        raise invalid(f"{kind} cannot be combined with tools", "tools")
    if impossible := _impossible(sampling, model):
        if budget is None and (not found.tools or (found.choice == "auto" and not has_form)):
            return None  # a form alone is refused with the other parameters
        raise invalid(f"tool_choice {found.choice}: {impossible}" if found.tools else impossible)
    closes_objects = sampling.strict or not model.undeclared_keys
    form: pb.SamplingParams | None = None
    if has_form:
        form = pb.SamplingParams()
        form.CopyFrom(sampling)
        sampling.ClearField("constraint")
        sampling.strict = False
    tools = [tool for tool in found.tools if found.named in ("", tool.name)]
    grammars: ToolGrammars = service.grammars(syntax, model)
    parallel = fields.parallel_tool_calls is not False and not found.named

    async def make_form(prompt_end: str) -> str:
        is_open = opens_reasoning(syntax, prompt_end)
        try:
            return await grammars.read(
                tools,
                found.choice,
                parallel=parallel,
                thinking_open=is_open,
                thinking_closed=closes_reasoning(syntax, prompt_end) or not (thinks or is_open),
                form=form,
                thinking_budget=budget,
                closes_objects=closes_objects,
            )
        except FormError as error:
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None

    return make_form


def _impossible(sampling: pb.SamplingParams, model: ServedModel) -> str:
    """Why the output cannot have a form; "" if it can."""
    if not model.has_forms:
        return (
            "calls cannot be required here, because workers run without --forms or the model has no tokenizer of bytes"
        )
    for name in ("beam_width", "ignore_eos"):
        if getattr(sampling, name):
            return f"forms cannot be combined with {name}"
    return ""
