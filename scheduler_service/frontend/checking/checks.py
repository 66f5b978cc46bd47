"""Checks that several kinds of requests share. Every error message names the field, its value and the limit."""

import asyncio
from array import array
from collections.abc import Collection, Sequence
from typing import NoReturn

import grpc

from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.text.tokenization import Tokenizer

IDS_AT_ONCE = 1 << 13
"""Token ids that are read in one turn of the event loop."""


def invalid(message: str) -> NoReturn:
    raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, message)


def check_length(name: str, length: int, most: int) -> None:
    if length > most:
        invalid(f"{name} has {length} entries; at most {most} are allowed")


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
