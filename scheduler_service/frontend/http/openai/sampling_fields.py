"""The sampling parameters in a JSON body: OpenAI's and vLLM's fields, converted to InferenceService's parameters."""

import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.sampling import MAX_LOGIT_BIASES, MAX_N, MAX_STOP_STRINGS, NUMBERS
from scheduler_service.frontend.http.body import Fields, ListOf, Number, Part, Priority
from scheduler_service.frontend.http.errors import HttpError, invalid
from scheduler_service.frontend.model import ServedModel

Outputs = Annotated[int, Field(ge=1, le=MAX_N)]
MAX_SHOWN = 4
"""Wrong entries of `logit_bias` that an error shows."""
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")
_AS_THEY_ARE = (
    *NUMBERS,
    *("n", "best_of", "seed", "min_tokens", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "prompt_logprobs", "length_penalty", "early_stopping"),
)
_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")
_LARGE = (
    *("allowed_token_ids", "bad_words", "logit_bias", "response_format", "stop", "stop_token_ids", "metadata"),
    *("structured_outputs", "regex", "json_schema", "ebnf", "user"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
"""Fields that may take much more memory when parsed than in the body."""


def _without_underscore(name: str) -> str:
    return name.rstrip("_")


class StreamOptions(Part):
    """`continuous_usage_stats`: every event has the usage so far, unless `include_usage` is false, as in vLLM."""

    include_usage: bool | None = None
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False

    @property
    def in_events(self) -> bool:
        """Whether every event has the usage so far."""
        return self.continuous_usage_stats and self.include_usage is not False

    @property
    def at_end(self) -> bool:
        """Whether the last event has the usage."""
        return self.include_usage is True or self.in_events


class JsonSchema(BaseModel):
    """A JSON schema. Its name and description have no effect."""

    schema_: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None
    name: str | None = None
    description: str | None = None
    model_config = ConfigDict(alias_generator=_without_underscore, extra="forbid", strict=True)


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


Choices = Annotated[list[str], Field(fail_fast=True, max_length=1024)]


class StructuredOutputs(Part):
    """The value of vLLM's field `structured_outputs`."""

    json_: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    model_config = ConfigDict(alias_generator=_without_underscore)


if TYPE_CHECKING:
    NumberFields = Fields
else:
    NumberFields = create_model(
        "NumberFields",
        __base__=Fields,
        **{name: (float | None if one.kind is float else Number | None, None) for name, one in NUMBERS.items()},
    )


class SamplingFields(NumberFields):
    """The fields that completions and chats share."""

    logit_bias: dict[str, Any] | None = None
    max_tokens: Number | None = None
    n: Outputs | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: str | ListOf[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    top_k: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = None
    best_of: Outputs | None = None
    min_tokens: Number | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Number], Field(fail_fast=True, max_length=64)] | None = None
    allowed_token_ids: ListOf[Number] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    prompt_logprobs: Number | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    priority: Priority = 0
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    request_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    parse_special_tokens: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


def sampling_params(fields: SamplingFields, model: ServedModel) -> pb.SamplingParams:
    """The sampling parameters of a request, except the number of tokens and of log-probabilities.

    Large fields that were read are set to None afterwards. Raises HttpError.
    """
    sampling = pb.SamplingParams(logit_bias=_read_bias(fields.logit_bias))
    for name in _AS_THEY_ARE:
        if (value := getattr(fields, name)) is not None:
            value = max(value, 0) if name == "top_k" else value  # vLLM's -1 means all tokens
            value = value & (1 << 64) - 1 if name == "seed" else value
            setattr(sampling, name, value)
    for name in _LISTS:
        getattr(sampling, name).extend(getattr(fields, name) or ())
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or ()
    if len(stop) > MAX_STOP_STRINGS:
        raise invalid(f"stop has {len(stop)} strings; it may have {MAX_STOP_STRINGS}", "stop")
    sampling.stop.extend(stop)
    if fields.use_beam_search:
        sampling.beam_width = max(fields.best_of or 1, fields.n or 1)
        sampling.ClearField("best_of")
    elif not sampling.HasField("temperature"):
        sampling.temperature = model.defaults.http_temperature
    _set_form(sampling, fields)
    for name in _LARGE:
        setattr(fields, name, None)
    return sampling


def kept_tokens(fields: SamplingFields, sampling: pb.SamplingParams, model: ServedModel) -> int | None:
    """The number of tokens at the prompt's end that are kept; None for all. As in vLLM, -1 means the model's limit."""
    if fields.truncate_prompt_tokens == -1:
        return max(1, model.context_length - (sampling.max_tokens or 1))
    return fields.truncate_prompt_tokens


def _read_bias(given: dict[str, Any] | None) -> dict[int, float]:
    """Parse `logit_bias`. Raises HttpError."""
    given = given or {}
    if len(given) > MAX_LOGIT_BIASES:
        raise invalid(f"logit_bias has {len(given)} entries; it may have {MAX_LOGIT_BIASES}", "logit_bias")
    wrong = [
        (key, bias)
        for key, bias in given.items()
        if not _TOKEN_ID.fullmatch(key) or isinstance(bias, bool) or not isinstance(bias, int | float)
    ]
    if wrong:
        shown = ", ".join(f"{key[:20]!r}: {str(bias)[:20]}" for key, bias in wrong[:MAX_SHOWN])
        raise invalid(f"logit_bias has {shown}; it must have token ids and numbers", "logit_bias")
    try:
        return {int(key): float(bias) for key, bias in given.items()}
    except OverflowError:
        raise invalid("logit_bias has a number that is too large", "logit_bias") from None


def _set_form(sampling: pb.SamplingParams, fields: SamplingFields) -> None:
    """Set the output form from the field that defines a form. Raises HttpError if several fields define a form."""
    forms: list[tuple[str, Any]] = [
        ("json_schema", fields.json_schema),
        ("grammar", fields.ebnf),
        ("regex", fields.regex),
        ("json_schema", _as_text(fields.guided_json)),
        ("regex", fields.guided_regex),
        ("choice", fields.guided_choice),
        ("grammar", fields.guided_grammar),
    ]
    if (asked := fields.response_format) is not None:
        forms.append(("json_schema", _schema_of(asked)))
        sampling.strict = asked.json_schema is not None and asked.json_schema.strict is True
    if (outputs := fields.structured_outputs) is not None:
        forms += [
            ("json_schema", _as_text(outputs.json_)),
            ("json_schema", '{"type": "object"}' if outputs.json_object else None),
            ("regex", outputs.regex),
            ("choice", outputs.choice),
            ("grammar", outputs.grammar),
        ]
    given = [(name, form) for name, form in forms if form is not None]
    if len(given) > 1:
        raise invalid(f"an output can have one form, and {len(given)} are asked for", "response_format")
    for name, form in given:
        if name == "choice":
            sampling.choice.options.extend(form)
        else:
            setattr(sampling, name, form)


def _as_text(schema: dict[str, Any] | str | None) -> str | None:
    return json.dumps(schema) if isinstance(schema, dict) else schema


def _schema_of(asked: ResponseFormat) -> str | None:
    """The JSON schema of a response format. Raises HttpError."""
    if asked.type != "json_schema" and asked.json_schema is not None:
        raise invalid(f"response_format.json_schema is set, and the type is {asked.type}", "response_format")
    match asked:
        case ResponseFormat(type="json_object"):
            return '{"type": "object"}'
        case ResponseFormat(type="json_schema", json_schema=None):
            raise invalid("response_format.json_schema is missing", "response_format")
        case ResponseFormat(type="json_schema", json_schema=JsonSchema(schema_=schema)):
            return json.dumps(schema)
    return None


def check_store(fields: SamplingFields) -> None:
    """Refuse to store an answer: this server stores nothing."""
    if fields.store:
        raise HttpError(400, "unsupported", "store is true; this server stores no answers", "store")
