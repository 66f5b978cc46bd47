"""The fields of a /v1/responses body."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, create_model

from pagewire_common.sampling import MAX_LOGPROBS
from scheduler_service.frontend.http.body import Fields, Number, Part
from scheduler_service.frontend.http.openai.chat_fields import MAX_TOOLS, ChatFields, Function, NamedFunction
from scheduler_service.frontend.http.openai.sampling_fields import JsonSchema

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
MAX_ID_LENGTH = 512
Id = Annotated[str, Field(max_length=MAX_ID_LENGTH)]
"""The id of an item or a call, of any form."""
Name = Annotated[str, Field(max_length=1024)]
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]
"""Values of `include`. Only the first two can occur here: the others are about pictures and hosted tools."""


class FunctionTool(Function):
    """A function of the client. `output_schema` says what the function returns, and has no effect."""

    type: Literal["function"]
    output_schema: dict[str, Any] | None = None
    defer_loading: Literal[False] | None = None


class FunctionChoice(NamedFunction):
    type: Literal["function"]


class Format(JsonSchema):
    """The form of the answer. The schema is for the type `json_schema` alone."""

    type: Literal["text", "json_object", "json_schema"]


class TextField(Part):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningField(Part):
    """With `summary: auto` the server chooses, and gives none: the answer has the reasoning itself."""

    effort: Annotated[str, Field(max_length=16)] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto", "all_turns"] | None = None


class StreamOptions(Part):
    include_obfuscation: Literal[False] = False


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


AS_IN_CHATS = (
    *("top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "include_stop_str_in_output"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "chat_template_kwargs", "structured_outputs"),
    *("priority", "cache_salt", "request_id"),
)
"""Further fields of vLLM, which mean the same as in chats."""
if TYPE_CHECKING:
    SharedFields = Fields
else:
    SharedFields = create_model(
        "SharedFields",
        __base__=Fields,
        **{
            name: (field.rebuild_annotation(), field.default)
            for name, field in ChatFields.model_fields.items()
            if name in AS_IN_CHATS
        },
    )


class ResponseFields(SharedFields):
    """OpenAI's fields, and some of vLLM's. `input` and `tools` are checked item by item where they are converted."""

    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: Id | None = None
    store: bool = False
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Number | None = None
    text: TextField | None = None
    reasoning: ReasoningField | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=1 << 32)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[Included], Field(fail_fast=True, max_length=16)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    background: Literal[False] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    model_config = ConfigDict(protected_namespaces=())

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def has_encrypted(self) -> bool:
        return ENCRYPTED in (self.include or ())
