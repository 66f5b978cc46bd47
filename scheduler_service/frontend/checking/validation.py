"""Checks a GenerateRequest and converts it to a GenerationRequest. Error messages name the field and its limit."""

import grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from pagewire_common.sampling import MAX_BAD_WORDS, MAX_LOGIT_BIASES, MAX_N, MAX_STOP_TOKENS, MAX_STRING
from scheduler_service.frontend.checking.checks import check_context, check_length, invalid
from scheduler_service.frontend.checking.prompt import MAX_MESSAGES, encode_prompt, read_encoder_prompt
from scheduler_service.frontend.checking.sampling_validation import check_sampling, read_sampling
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request import GenerationRequest

MAX_REQUEST_ID = 128
MAX_PRIORITY = 1000


def check_names(message: pb.GenerateRequest | pb.AbortRequest) -> None:
    """Raises RequestError for a request_id or tenant that is too long for log lines."""
    check_characters("request_id", message.request_id, MAX_REQUEST_ID)
    check_characters("tenant", message.tenant)


def check_characters(name: str, text: str, most: int = MAX_STRING) -> None:
    if len(text) > most:
        invalid(f"{name} has {len(text)} characters; at most {most} are allowed")


def check_sizes(message: pb.GenerateRequest) -> None:
    """Raises RequestError if a list of the message has too many entries, or for too many outputs.

    `check_sizes` needs no model. Call it before any code iterates over the message's lists or counts their bytes.
    """
    check_characters("lora_name", message.lora_name)
    check_length("chat.messages", len(message.chat.messages), MAX_MESSAGES)
    check_length("resume.outputs", len(message.resume.outputs), MAX_N)
    check_length("sampling.bad_words", len(message.sampling.bad_words), MAX_BAD_WORDS)
    check_length("sampling.stop_token_ids", len(message.sampling.stop_token_ids), MAX_STOP_TOKENS)
    check_length("sampling.logit_bias", len(message.sampling.logit_bias), MAX_LOGIT_BIASES)
    for name in ("n", "best_of", "beam_width"):
        if (number := getattr(message.sampling, name)) > MAX_N:
            invalid(f"sampling.{name} is {number}; it must be at most {MAX_N}")


def check_place(
    message: pb.GenerateRequest | pb.EmbedRequest | pb.ScoreRequest | pb.TranscribeRequest, model: ServedModel
) -> None:
    """Raises RequestError for an invalid `cache_salt` or `priority`."""
    check_characters("cache_salt", message.cache_salt)
    if message.priority and not model.has_priorities:
        invalid(f"priority is {message.priority}; this server does not run with --scheduling-policy priority")
    if abs(message.priority) > MAX_PRIORITY:
        invalid(f"priority is {message.priority}; it must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")


async def check_request(message: pb.GenerateRequest, request_id: str, model: ServedModel) -> GenerationRequest:
    """Make all checks of a GenerateRequest except those of `check_sizes`, cheap checks first. Raises RequestError."""
    if not model.generates:
        reason = "this model reads texts and generates none; it can be asked to Embed or to Score"
        raise RequestError(grpc.StatusCode.UNIMPLEMENTED, reason)
    check_place(message, model)
    sampling = message.sampling
    check_sampling(sampling, model)
    encoder_input = await read_encoder_prompt(message, model)
    prompt = await encode_prompt(message, model)
    check_context("the prompt", len(prompt), model)
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=await read_sampling(sampling, prompt, model),
        n=(sampling.n or 1) if sampling.best_of > (sampling.n or 1) else None,
        hides_logprobs=not sampling.HasField("logprobs"),
        stop=tuple(sampling.stop) or model.defaults.stop,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        priority=message.priority,
        encoder_input=encoder_input,
        skip_special_tokens=sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True,
    )
