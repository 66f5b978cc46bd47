"""The fields of a /v1/completions body, and their translation into pagewire's own protocol."""

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.http.call import Fields, ListOf, Number, Part, Priority, Texts
from pagewire_client.http.errors import invalid
from pagewire_client.http.unread import read_bias
from pagewire_common.sampling import MAX_N, MAX_STOP_STRINGS, NUMBERS

MAX_TOKENS = 16
"""Default number of output tokens, as in OpenAI's API and in vLLM."""
_ONLY_FOR_SAMPLING = (
    *("allowed_token_ids", "bad_words", "logit_bias", "response_format", "stop", "stop_token_ids"),
    *("structured_outputs", "regex", "json_schema", "ebnf", "user"),
)
Outputs = Annotated[int, Field(ge=1, le=MAX_N)]
_AS_THEY_ARE = (
    *NUMBERS,
    *("n", "best_of", "seed", "logprobs", "min_tokens", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "length_penalty", "early_stopping"),
)
_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")


def _without_underscore(name: str) -> str:
    return name.rstrip("_")


class StreamOptions(Part):
    include_usage: bool = False


class JsonSchema(BaseModel):
    """A JSON schema. The schema's name and description are ignored."""

    schema_: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None
    model_config = ConfigDict(alias_generator=_without_underscore)


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Part):
    """The value of vLLM's field `structured_outputs`."""

    json_: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, max_length=1024)] | None = None
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


class CompletionFields(NumberFields):
    """OpenAI's fields, and the fields of vLLM that pagewire's own protocol also has."""

    prompt: Texts
    best_of: Outputs | None = None
    echo: bool | None = None
    logit_bias: dict[str, Any] | None = None
    logprobs: Number | None = None
    max_tokens: Number | None = None
    n: Outputs | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = None
    min_tokens: Number | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Number], Field(fail_fast=True, max_length=64)] | None = None
    allowed_token_ids: ListOf[Number] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    priority: Priority = 0


def sampling_params(fields: CompletionFields) -> pb.SamplingParams:
    """Return the sampling parameters of a completion request. The lists and texts that were read for them are set to
    None afterwards. Raises HttpError.
    """
    sampling = pb.SamplingParams(logit_bias=read_bias(fields.logit_bias))
    for name in _AS_THEY_ARE:
        if (value := getattr(fields, name)) is not None:
            value = max(value, 0) if name == "top_k" else value  # vLLM's -1 means all tokens
            value = value & (1 << 64) - 1 if name == "seed" else value
            setattr(sampling, name, value)
    for name in _LISTS:
        getattr(sampling, name).extend(getattr(fields, name) or ())
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or ()
    if len(stop) > MAX_STOP_STRINGS:
        raise invalid(f"stop has {len(stop)} strings; it may have {MAX_STOP_STRINGS}")
    sampling.stop.extend(stop)
    sampling.max_tokens = MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    if fields.echo:
        sampling.max_tokens = max(sampling.max_tokens, 1)  # 0: the client requests only the echoed prompt
        if fields.logprobs is not None:
            sampling.prompt_logprobs = fields.logprobs
    if fields.use_beam_search:
        sampling.beam_width = max(fields.best_of or 1, fields.n or 1)
        sampling.ClearField("best_of")
    _set_form(sampling, fields)
    for name in _ONLY_FOR_SAMPLING:  # parsed, these fields may use much more memory than in the body
        setattr(fields, name, None)
    return sampling


def _set_form(sampling: pb.SamplingParams, fields: CompletionFields) -> None:
    """Set the output form from the field that defines a form. Raises HttpError if several fields define a form."""
    forms: list[tuple[str, str]] = []
    if fields.json_schema is not None:
        forms.append(("json_schema", fields.json_schema))
    if fields.ebnf is not None:
        forms.append(("grammar", fields.ebnf))
    if fields.regex is not None:
        forms.append(("regex", fields.regex))
    if (asked := fields.response_format) is not None and asked.type != "text":
        if asked.type == "json_schema" and asked.json_schema is None:
            raise invalid("response_format.json_schema is missing")
        schema = {"type": "object"} if asked.json_schema is None else asked.json_schema.schema_
        sampling.strict = asked.json_schema is not None and asked.json_schema.strict is True
        forms.append(("json_schema", json.dumps(schema)))
    if (outputs := fields.structured_outputs) is not None:
        if outputs.json_ is not None:
            text = outputs.json_ if isinstance(outputs.json_, str) else json.dumps(outputs.json_)
            forms.append(("json_schema", text))
        if outputs.regex is not None:
            forms.append(("regex", outputs.regex))
        if outputs.grammar is not None:
            forms.append(("grammar", outputs.grammar))
        if outputs.choice is not None:
            forms.append(("choice", ""))
            sampling.choice.options.extend(outputs.choice)
    if len(forms) > 1:
        raise invalid(f"an output can have one form, and {len(forms)} are asked for")
    for name, form in forms:
        if name != "choice":
            setattr(sampling, name, form)
