"""The fields of a /v1/completions body."""

from typing import Annotated, Literal

from pydantic import Field

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.http.body import ListOf, Number, Texts, decode_base64, each_text
from scheduler_service.frontend.http.errors import invalid
from scheduler_service.frontend.http.limits import Held
from scheduler_service.frontend.http.openai.sampling_fields import SamplingFields, check_store, sampling_params
from scheduler_service.frontend.model import ServedModel

MAX_TOKENS = 16
"""Default number of output tokens, as in OpenAI's API and in vLLM."""


class CompletionFields(SamplingFields):
    """OpenAI's fields, and vLLM's fields that InferenceService has too."""

    prompt: Texts | None = None
    prompt_embeds: Annotated[str, Field(min_length=1)] | ListOf[str] | None = None
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


async def given_prompts(fields: CompletionFields, held: Held) -> list[str | list[int] | bytes]:
    """The prompts: first embeddings, as safetensors, then texts and lists of token ids. Raises HttpError.

    Without other prompts, clients send an empty `prompt` beside prompt_embeds, because OpenAI's library wants one.
    """
    given = fields.prompt_embeds
    if given is None:
        if fields.prompt is None:
            raise invalid("prompt: Field required", "prompt")
        return [*each_text(fields.prompt)]
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(fields, name):
            raise invalid(f"{name} is not possible with prompt_embeds, because embeddings have no token ids", name)
    embeds = [given] if isinstance(given, str) else given
    held.take(2 * sum(map(len, embeds)))  # decoded, and in a request
    found: list[str | list[int] | bytes] = [await decode_base64("prompt_embeds", one) for one in embeds]
    return found + (each_text(fields.prompt) if fields.prompt else [])
