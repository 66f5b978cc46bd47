"""The fields of a /v1/completions body."""

from typing import Literal

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.http.body import Number, Texts
from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.openai.sampling_fields import SamplingFields, check_store, sampling_params
from scheduler_service.frontend.model import ServedModel

MAX_TOKENS = 16
"""Default number of output tokens, as in OpenAI's API and in vLLM."""


class CompletionFields(SamplingFields):
    """OpenAI's fields, and vLLM's fields that InferenceService has too."""

    prompt: Texts
    echo: bool | None = None
    logprobs: Number | None = None
    add_special_tokens: Literal[True] | None = None
    truncation_side: Literal["left", "right"] | None = None


def completion_params(fields: CompletionFields, model: ServedModel) -> pb.SamplingParams:
    """The sampling parameters of a completion request. Raises HttpError."""
    check_store(fields)
    sampling = sampling_params(fields, model)
    sampling.max_tokens = MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    if fields.logprobs is not None:
        sampling.logprobs = fields.logprobs
    if fields.truncation_side is not None and fields.truncate_prompt_tokens is None:
        raise invalid("truncation_side needs truncate_prompt_tokens", "truncation_side")
    if fields.echo and fields.truncate_prompt_tokens is not None:
        raise invalid("echo cannot be combined with truncate_prompt_tokens", "echo")
    if fields.echo:
        sampling.max_tokens = max(sampling.max_tokens, 1)  # 0: the client requests only the echoed prompt
        if fields.logprobs is not None:
            if fields.prompt_logprobs not in (None, fields.logprobs):
                raise invalid("echo with logprobs needs as many prompt_logprobs", "prompt_logprobs")
            sampling.prompt_logprobs = fields.logprobs
    return sampling
