"""Reads the JSON body of an HTTP request into fields that are all known."""

import asyncio
import binascii
from collections.abc import Set
from typing import Annotated, Any, TypeVar

import numpy as np
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from scheduler_service.frontend.http.errors import HttpError, invalid
from scheduler_service.frontend.http.limits import Held

MAX_TEXTS = 2048
"""Largest number of texts of an HTTP request, as over gRPC."""
MAX_VALUES = 1 << 15
"""Values and escapes in a body beyond the size of a request without prompt_embeds and images."""
DECODED_AT_ONCE = 1 << 20
"""Characters of base64 that are decoded in one turn of the event loop."""
VALUE_BYTES = 64
"""Bytes of a parsed value. An empty object of two characters takes 64 bytes."""
Number = Annotated[int, Field(ge=0, lt=1 << 32)]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
T = TypeVar("T")
ListOf = Annotated[list[T], Field(fail_fast=True)]
"""A list whose validation stops at the first error. All errors of a list with a million mistakes would take a
gigabyte.
"""
Texts = (
    str
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_TEXTS)]
    | ListOf[Number]
    | Annotated[list[ListOf[Number]], Field(fail_fast=True, max_length=MAX_TEXTS)]
)
"""A text, the token ids of a text, or a list of texts or of lists of token ids."""


def each_text(given: Texts) -> list[str | list[int]]:
    """The texts of a JSON field. A list of numbers is the token ids of one text."""
    is_one = isinstance(given, str) or (given and isinstance(given[0], int))
    texts: Any = [given] if is_one else given
    return list(texts)


class Part(BaseModel):
    """A JSON object whose fields are all known: an unknown field might be meant to change the answer.

    A field that is null counts as absent.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        given = {name: value for name, value in given.items() if value is not None}
        # Only the first unknown field is reported, because pydantic would create an error for each field.
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in given if name not in known), None)
        return given if unknown is None else {unknown: given[unknown]}


class Fields(Part):
    """The fields of every request's body."""

    model: Annotated[str, Field(max_length=256)] = ""
    user: Annotated[str, Field(max_length=1024)] | None = None


AnyFields = TypeVar("AnyFields", bound=Part)


def parsed_bytes(body: bytes) -> int:
    """Upper bound of the memory of a body's parsed values in bytes, without their texts."""
    return VALUE_BYTES * sum(map(body.count, (b",", b"{", b"[")))


async def check_simple(body: bytes, most_bytes: int) -> int:
    """Refuse a large body that is not mostly plain text such as base64, because parsing it would take long. Returns an
    upper bound of the memory of its parsed values, as `parsed_bytes`, which would count for 60 ms."""

    def count() -> int:
        characters = np.frombuffer(body, dtype=np.uint8)
        return sum(int(np.count_nonzero(characters == mark)) for mark in b",{[\\")

    if (num_marks := await asyncio.to_thread(count)) > MAX_VALUES:
        raise too_large(len(body), most_bytes)
    return VALUE_BYTES * num_marks


def parse(body: bytes, kind: type[AnyFields]) -> AnyFields:
    """Parse and validate a body. Raises HttpError."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None


def parse_names(body: bytes) -> Set[str]:
    """The names in a body that have a value. Raises HttpError.

    A body of 1 MiB takes 1 ms, or 28 ms if it consists of empty objects.
    """
    try:
        found = from_json(body)
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise invalid("the body: Input should be an object")
    return {name for name, value in found.items() if value is not None}


def parse_part(given: Any, kind: type[AnyFields], place: str) -> AnyFields:
    """Validate a parsed part of a body. `place`: the part's name in errors. Raises HttpError."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error, place) from None


async def read_body(request: web.Request, held: Held, most_bytes: int, seconds: float) -> bytes:
    """Read a JSON body, and reserve memory for its bytes as they arrive.

    Raises HttpError if the body is too large, takes longer than `seconds`, or is not declared as JSON.
    """
    if "Content-Encoding" in request.headers:
        raise HttpError(415, "unsupported", "send the body as it is, without Content-Encoding")
    if request.content_type != "application/json":  # browsers do not let pages of other sites send JSON
        raise HttpError(415, "unsupported", "the body must be JSON, with Content-Type: application/json")
    check_length(request, most_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.content.iter_any():
                if len(body) + len(piece) > most_bytes:
                    raise too_large(len(body) + len(piece), most_bytes)
                held.take(len(piece))
                body += piece
    except TimeoutError:
        raise HttpError(408, "timeout", f"the body did not come within {seconds:g} s") from None
    return bytes(body)


def check_length(request: web.Request, most_bytes: int) -> None:
    """Raise HttpError if Content-Length is too large."""
    if (num_bytes := request.content_length or 0) > most_bytes:
        raise too_large(num_bytes, most_bytes)


def too_large(num_bytes: int, most_bytes: int, what: str = "or more") -> HttpError:
    return HttpError(413, "too_large", f"the body has {num_bytes} bytes {what}; it may have {most_bytes}")


async def decode_base64(place: str, text: str) -> bytes:
    """Decode a text in turns of the event loop. Raises HttpError, which begins with `place`."""
    decoded = bytearray()
    for start in range(0, len(text), DECODED_AT_ONCE):
        try:
            decoded += binascii.a2b_base64(text[start : start + DECODED_AT_ONCE], strict_mode=True)
        except ValueError as error:
            raise invalid(f"{place} is not base64: {error}", place.partition("[")[0]) from None
        await asyncio.sleep(0)  # lets other tasks run
    return bytes(decoded)


def _refusal(error: ValidationError, place: str = "") -> HttpError:
    """The error of the first invalid field. For a field of several types, pydantic reports an error for each type.

    `place`: the name of the part of the body that was validated; "" for the whole body.
    """
    found = error.errors(include_url=False, include_input=False)
    first, *others = sorted(found, key=lambda one: one["type"] != "extra_forbidden")
    path = ".".join(filter(None, (place, *map(str, first["loc"]))))[:64]
    if first["type"] == "json_invalid":
        return invalid(f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if too_long := next((one for one in found if one["type"] == "too_long"), None):
        name, most = ".".join(filter(None, (place, str(too_long["loc"][0])))), too_long["ctx"]["max_length"]
        return invalid(f"{name} has more than the {most} entries that are allowed", name)
    if first["type"] == "extra_forbidden":  # `Part` has left out the known fields beside an unknown field
        others = [one for one in others if (one["type"], one["loc"][:-1]) != ("missing", first["loc"][:-1])]
    if any(other["loc"][:1] == first["loc"][:1] for other in others):
        name = ".".join(filter(None, (place, str(first["loc"][0]))))
        return invalid(f"{name} does not have the form that it must have", name)
    if first["type"] == "extra_forbidden":
        return invalid(f"{path} is not supported here", path)
    return invalid(f"{path}: {first['msg']}" if path else f"the body: {first['msg']}", path or None)
