"""Checks that several kinds of requests share, and the checks before any work on a Generate request.

Every error message names the field, its value and the limit.
"""

import asyncio
from array import array
from collections.abc import Collection, Sequence
from typing import NoReturn

import grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from pagewire_common.sampling import MAX_BAD_WORDS, MAX_LOGIT_BIASES, MAX_N, MAX_STOP_TOKENS, MAX_STRING
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.text.tokenization import Tokenizer

MAX_REQUEST_ID = 128
MAX_PRIORITY = 1000
MAX_MESSAGES = 4096
MAX_PARTS = 256
"""Largest number of parts of a prompt, and of a chat message."""
IDS_AT_ONCE = 1 << 13
"""Token ids that are read in one turn of the event loop."""


def invalid(message: str) -> NoReturn:
    raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, message)


def check_length(name: str, length: int, most: int) -> None:
    if length > most:
        invalid(f"{name} has {length} entries; at most {most} are allowed")


def check_characters(name: str, text: str, most: int = MAX_STRING) -> None:
    if len(text) > most:
        invalid(f"{name} has {len(text)} characters; at most {most} are allowed")


def check_names(message: pb.GenerateRequest | pb.AbortRequest) -> None:
    check_characters("request_id", message.request_id, MAX_REQUEST_ID)
    check_characters("tenant", message.tenant)


def check_place(
    message: pb.GenerateRequest | pb.EmbedRequest | pb.ScoreRequest | pb.TranscribeRequest, model: ServedModel
) -> None:
    check_characters("cache_salt", message.cache_salt)
    if message.priority and not model.has_priorities:
        invalid(f"priority is {message.priority}; this server does not run with --scheduling-policy priority")
    if abs(message.priority) > MAX_PRIORITY:
        invalid(f"priority is {message.priority}; it must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")


def check_sizes(message: pb.GenerateRequest) -> None:
    """Refuse too long lists, before any code iterates over them or counts their bytes."""
    check_characters("lora_name", message.lora_name)
    check_length("chat.messages", len(message.chat.messages), MAX_MESSAGES)
    check_length("resume.outputs", len(message.resume.outputs), MAX_N)
    check_length("sampling.bad_words", len(message.sampling.bad_words), MAX_BAD_WORDS)
    check_length("sampling.stop_token_ids", len(message.sampling.stop_token_ids), MAX_STOP_TOKENS)
    check_length("sampling.logit_bias", len(message.sampling.logit_bias), MAX_LOGIT_BIASES)
    for name in ("n", "best_of", "beam_width"):
        if (number := getattr(message.sampling, name)) > MAX_N:
            invalid(f"sampling.{name} is {number}; it must be at most {MAX_N}")


def check_token_ids(field: str, token_ids: Collection[int], model: ServedModel) -> None:
    """Refuse ids outside the vocabulary, for which a worker would refuse a whole step."""
    largest = max(token_ids, default=0)
    if largest >= model.vocabulary_size:
        invalid(f"{field} contains {largest}; the vocabulary has {model.vocabulary_size} tokens")


def check_context(field: str, num_tokens: int, model: ServedModel) -> None:
    if num_tokens >= model.context_length:
        invalid(
            f"{field} has {num_tokens} tokens; the context has {model.context_length}, "
            "and at least one must be left for the output"
        )


def check_characters_of_context(field: str, count: int, model: ServedModel, tokenizer: Tokenizer) -> None:
    """Refuse a text that would exceed the context even if each token were the vocabulary's longest token."""
    most = model.context_length * tokenizer.longest_token
    if count > most:
        invalid(f"{field} has {count} characters; the context of {model.context_length} tokens holds fewer than {most}")


def require_tokenizer(field: str, model: ServedModel) -> Tokenizer:
    if model.tokenizer is None:
        invalid(f"{field} is not possible with this model: it has no tokenizer; use token ids")
    return model.tokenizer


async def take_token_ids(token_ids: Sequence[int]) -> "array[int]":
    """Copy token ids in several turns of the event loop, at 50 to 90 ns an id."""
    taken = array("I")
    for start in range(0, len(token_ids), IDS_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        taken.extend(token_ids[start : start + IDS_AT_ONCE])
    return taken
