"""The fields of the bodies of /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from pagewire_common.sampling import MAX_STOP_STRINGS
from scheduler_service.frontend.http.body import ListOf, Number, Part
from scheduler_service.frontend.http.openai.chat_fields import MAX_TOOLS

Text = Annotated[str, Field(min_length=1)]


class CacheControl(Part):
    """A mark for the prompt cache. The mark has no effect: all prefixes are cached, for as long as memory lasts."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class ToolFields(Part):
    """A tool that the client runs. With `strict`, an argument outside the schema is impossible.

    `eager_input_streaming` has no effect: the input of every tool is streamed while the model writes it.
    """

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(fail_fast=True, max_length=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _runs_at_the_client(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in (None, "custom"):
            shown = repr(kind)[:64].replace("{", "{{").replace("}", "}}")
            reason = "this server runs no tools; it knows tools of the type custom"
            raise PydanticCustomError("server_tool", f"type is {shown}; {reason}")
        return given


class ToolChoice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Part):
    """`budget_tokens`: the number of tokens after which thinking is closed. `display`: `omitted` hides its text."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, lt=1 << 32)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Part):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Part):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class RequestMetadata(Part):
    user_id: Annotated[str, Field(max_length=1024)] | None = None


class CountFields(Part):
    """The fields that make up a prompt. `system` and `messages` are checked where they are converted."""

    model: Annotated[str, Field(max_length=256)]
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    system: str | ListOf[dict[str, Any]] | None = None
    tools: Annotated[list[ToolFields], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None

    model_config = ConfigDict(protected_namespaces=())


class MessagesFields(CountFields):
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 32)]
    stop_sequences: Annotated[list[Text], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: Number | None = None
    top_p: float | None = None
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
