"""The fields of a /v1/chat/completions body."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.sampling import MAX_LOGPROBS
from scheduler_service.frontend.http.body import Number, Part
from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.openai.sampling_fields import SamplingFields, check_store, sampling_params
from scheduler_service.frontend.model import ServedModel

MAX_TOOLS = 128
"""Tools of a request, as in OpenAI's API."""


class Function(Part):
    """`parameters`: the JSON schema of the arguments. With `strict`, an argument outside the schema is impossible."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(Part):
    type: Literal["function"]
    function: Function


class NamedFunction(Part):
    name: str


class NamedTool(Part):
    type: Literal["function"]
    function: NamedFunction


class ChatFields(SamplingFields):
    """OpenAI's fields, and vLLM's fields that InferenceService has too.

    `messages` are checked where they are converted for the chat template.
    """

    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    max_completion_tokens: Number | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[ToolField], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=16)] | None = None
    thinking_token_budget: Number | None = None
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=1024)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    echo: bool = False
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None

    model_config = ConfigDict(protected_namespaces=())

    @property
    def echoed(self) -> str:
        """The start of each answer: with `echo` the last message, if it is the assistant's. Raises HttpError."""
        last = self.messages[-1] if self.echo and self.messages else {}
        if last.get("role") != "assistant":
            return ""
        if not isinstance(text := last.get("content"), str):
            raise invalid("echo needs a last message whose content is a text", "echo")
        return text


def chat_params(fields: ChatFields, model: ServedModel) -> pb.SamplingParams:
    """The sampling parameters of a chat request, without the grammar of tool calls. Raises HttpError."""
    check_store(fields)
    if len({fields.max_tokens, fields.max_completion_tokens} - {None}) > 1:
        raise invalid("max_tokens and max_completion_tokens differ; set one of them", "max_completion_tokens")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if fields.prompt_logprobs is not None and fields.stream:
        raise invalid("prompt_logprobs cannot be streamed", "prompt_logprobs")
    sampling = sampling_params(fields, model)
    most = fields.max_completion_tokens if fields.max_tokens is None else fields.max_tokens
    if most is not None:
        sampling.max_tokens = most
    if fields.logprobs:
        sampling.logprobs = fields.top_logprobs or 0
    return sampling
