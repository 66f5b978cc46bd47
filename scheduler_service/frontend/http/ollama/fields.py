"""The fields of Ollama's bodies, and their conversion to the fields of a chat."""

import asyncio
from typing import Annotated, Any, Literal

from pydantic import Field

from scheduler_service.frontend.checking.checks import MAX_MESSAGES, MAX_PARTS, check_length
from scheduler_service.frontend.http.body import MAX_TEXTS, Part, parse_part
from scheduler_service.frontend.http.call import Call
from scheduler_service.frontend.http.chats.json_values import read_object, read_text, shown, shown_key
from scheduler_service.frontend.http.chats.thinking import can_think, thinking_fields
from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.images.image_reader import ImageSource, content_of
from scheduler_service.frontend.http.openai.chat_fields import MAX_TOOLS, ChatFields
from scheduler_service.frontend.http.openai.history import MESSAGES_AT_ONCE
from scheduler_service.frontend.model import ServedModel

LATEST = ":latest"
_SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
_RENAMED = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_RUNTIME = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap"),
    *("use_mlock", "vocab_only", "logits_all", "embedding_only", "num_keep", "mirostat_tau", "mirostat_eta"),
)
"""Options that have no effect, because an answer does not depend on them.

They tune Ollama's loading and memory. `num_ctx`: the context is the model's. `num_keep`: no context is shifted.
`mirostat_tau`, `mirostat_eta`: they count only with `mirostat`, which is refused.
"""
_NEUTRAL = {"mirostat": 0, "tfs_z": 1, "typical_p": 1, "repeat_last_n": -1, "penalize_newline": True}
"""Options that are refused, except with the value that means what this server does."""


class ModelFields(Part):
    """`keep_alive` has no effect: the model stays in memory."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class TextFields(ModelFields):
    format: Literal["", "json"] | dict[str, Any] | None = None
    stream: bool = True
    think: bool | Literal["low", "medium", "high"] | None = None


class ChatBody(TextFields):
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] = Field(default_factory=list)
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


class GenerateBody(TextFields):
    """With `raw`, the prompt is no message of a chat."""

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    images: Annotated[list[str], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None


class EmbedBody(ModelFields):
    input: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_TEXTS)]
    truncate: bool = True
    dimensions: Annotated[int, Field(ge=1, lt=1 << 32)] | None = None


class ShowBody(Part):
    model: Annotated[str, Field(min_length=1, max_length=256)]
    verbose: Literal[False] = False


def adapter_of(call: Call, asked: str, model: ServedModel) -> str:
    """The adapter that a name means, as `Call.adapter`. Ollama's tag `:latest` means the same as no tag."""
    served = (model.name, *call.service.link.adapter_names)
    return call.adapter(asked if asked in served else asked.removesuffix(LATEST), model)


async def chat_fields(
    fields: TextFields, messages: list[dict[str, Any]], tools: Any, model: ServedModel, *, is_chat: bool = True
) -> ChatFields:
    """The fields of a chat, or of a text with images. The lists are emptied. Raises HttpError and RequestError."""
    check_length("messages", len(messages), MAX_MESSAGES)
    given: dict[str, Any] = read_options(fields.options or {}) | {"messages": []}
    for number, message in enumerate(messages):
        if number and number % MESSAGES_AT_ONCE == 0:
            await asyncio.sleep(0)
        given["messages"].append(_message(f"messages[{number}]." if is_chat else "", message, model))
    messages.clear()
    if tools:
        given["tools"] = [{"type": "function", **tool} for tool in tools]
        tools.clear()
    if fields.format == "json":
        given["response_format"] = {"type": "json_object"}
    elif fields.format:
        given["response_format"] = {"type": "json_schema", "json_schema": {"schema": fields.format}}
    if isinstance(fields.think, str):
        if model.tokenizer is None or not model.tokenizer.template_names("reasoning_effort"):
            reason = "the model's chat template has no levels of reasoning"
            raise invalid(f"think is {fields.think!r}; {reason}", "think")
        given["reasoning_effort"] = fields.think
    elif fields.think is not None:
        if fields.think and not can_think(model):
            raise invalid("think: the model's chat template has no known reasoning", "think")
        given |= thinking_fields("think", model, is_on=fields.think)
    return parse_part(given, ChatFields, "")


def _message(place: str, message: dict[str, Any], model: ServedModel) -> dict[str, Any]:
    """A message of OpenAI's API. Its fields are checked where they are converted for the chat template. `place`: before
    the names of its fields in errors."""
    given = {name: value for name, value in message.items() if value is not None and name != "tool_name"}
    if images := given.pop("images", None):
        given["content"] = _content(place, given.get("content", ""), images, model)
    if message.get("tool_name") is not None:
        given["name"] = message["tool_name"]
    if isinstance(calls := given.get("tool_calls"), list):
        given["tool_calls"] = [_call(f"{place}tool_calls[{number}]", call) for number, call in enumerate(calls)]
    return given


def _content(place: str, text: Any, images: Any, model: ServedModel) -> Any:
    """A content with images, which come before its text."""
    if not model.reads_images:
        raise invalid(f"{place}images is set, and this model reads {model.reads}", "messages")
    if not isinstance(images, list):
        raise invalid(f"{place}images is {shown(images)}; it must be a list", "messages")
    places = [f"{place}images[{number}]" for number in range(len(images))]
    sources = [ImageSource(where, data=read_text(where, image)) for where, image in zip(places, images, strict=True)]
    return content_of([*sources, read_text(f"{place}content", text)])


def _call(place: str, call: Any) -> dict[str, Any]:
    given = dict(read_object(place, call))
    function = dict(read_object(f"{place}.function", given.get("function")))
    function.pop("index", None)  # calls are in order anyway
    return given | {"function": function}


def read_options(options: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters of `options`. Raises HttpError."""
    given: dict[str, Any] = {}
    for name, value in options.items():
        if name in _SAME or name in _RENAMED:
            given[_RENAMED.get(name, name)] = value
        elif value is not None and name not in _RUNTIME and (name not in _NEUTRAL or value != _NEUTRAL[name]):
            reason = f"it may only be {_NEUTRAL[name]}" if name in _NEUTRAL else "this server does not know it"
            raise invalid(f"options.{shown_key(name)} is {shown(value)}; {reason}", "options")
    if isinstance(most := given.get("max_tokens"), int) and most in (-1, -2):  # as many as the context leaves
        given["max_tokens"] = (1 << 32) - 1
    return given
