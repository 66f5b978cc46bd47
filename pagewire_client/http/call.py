"""An HTTP request that the scheduler answers directly, without the gateway."""

import asyncio
from collections.abc import AsyncIterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pagewire_client.http.errors import HttpError, invalid
from pagewire_client.http.token_texts import TokenTexts

STALL_SECONDS = 60.0
"""Maximum seconds that a client may leave a part of its answer unread."""
PIECE_BYTES = 1 << 16
"""Size in bytes of the parts in which an answer is written."""


class Room:
    """Memory limit in bytes for all requests and answers of this process, summed over all clients."""

    def __init__(self, num_bytes: int) -> None:
        self.num_free = num_bytes


@dataclass(slots=True)
class Held:
    """The part of the process's memory limit that one request has reserved, until the `with` block ends."""

    room: Room
    _num_bytes: int = 0

    def take(self, num_bytes: int) -> None:
        """Reserve memory for the request. Raises HttpError if less than `num_bytes` of the limit is free."""
        if num_bytes > self.room.num_free:
            raise HttpError(503, "overloaded", "too many large requests are under way; try again later")
        self.room.num_free -= num_bytes
        self._num_bytes += num_bytes

    def __enter__(self) -> "Held":
        return self

    def __exit__(self, *_: object) -> None:
        self.room.num_free += self._num_bytes
        self._num_bytes = 0


MAX_TEXTS = 2048
"""Maximum number of texts in one HTTP call. The scheduler has the same limit for gRPC calls."""
Number = Annotated[int, Field(ge=0, lt=1 << 32)]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
T = TypeVar("T")
ListOf = Annotated[list[T], Field(fail_fast=True)]
"""A list whose validation stops at the first error. If all errors of a list with a million mistakes were collected,
they would take a gigabyte.
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
    """A JSON object whose fields are all known.

    Unknown fields are refused, as in OpenAI's API, because they may be meant to change the answer. A field that is null
    counts as absent.
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
    """The fields of a request body."""

    model: Annotated[str, Field(max_length=256)] = ""
    user: Annotated[str, Field(max_length=1024)] | None = None


AnyFields = TypeVar("AnyFields", bound=Fields)


@dataclass(slots=True)
class Call:
    """An HTTP request and its connection to the scheduler.

    `model` is the name of the server's model. `metadata` contains the client's key. `own_metadata` contains this
    process's key, for calls that the client did not request.
    """

    request: web.Request
    stub: Any
    metadata: Any
    own_metadata: Any
    model: str
    held: Held
    most_bytes: int
    receive_seconds: float
    texts: TokenTexts

    async def fields(self, kind: type[AnyFields]) -> AnyFields:
        """Read and validate the JSON body. The memory for the body stays reserved until the call ends. Raises
        HttpError.
        """
        body = await read_body(self.request, self.held, self.most_bytes, self.receive_seconds)
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            raise invalid(_sentence(error)) from None

    def adapter(self, model: str) -> str:
        """The adapter that a request names: any name but the model's name. The scheduler checks that the adapter
        exists.
        """
        return "" if model in ("", self.model) else model


async def answer_in_parts(
    request: web.Request, whole: bytes, name: bytes, parts: AsyncIterable[bytes]
) -> web.StreamResponse:
    """Answer with the JSON object `whole`, extended by a list of JSON parts under the key `name`.

    Each part is created immediately before it is sent.
    """
    response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    await response.prepare(request)
    separator = b'{"%b":[' % name
    async for part in parts:
        await write(response, separator + part)
        await asyncio.sleep(0)  # lets other tasks run
        separator = b","
    await write(response, b"]," + whole.removeprefix(b"{"))
    await end(response)
    return response


async def write(response: web.StreamResponse, data: bytes) -> None:
    """Write data. Raises ConnectionResetError if the client reads nothing for STALL_SECONDS."""
    for start in range(0, len(data), PIECE_BYTES):
        with _connection_lost_in_time():
            async with asyncio.timeout(STALL_SECONDS):
                await response.write(data[start : start + PIECE_BYTES])


async def end(response: web.StreamResponse) -> None:
    """End the answer. Raises ConnectionResetError if the client reads nothing for STALL_SECONDS."""
    with _connection_lost_in_time():
        async with asyncio.timeout(STALL_SECONDS):
            await response.write_eof()


@contextmanager
def _connection_lost_in_time() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise ConnectionResetError(f"nothing was read for {STALL_SECONDS:g} s") from None


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
                    raise _too_large(len(body) + len(piece), most_bytes)
                held.take(len(piece))
                body += piece
    except TimeoutError:
        raise HttpError(408, "timeout", f"the body did not come within {seconds:g} s") from None
    return bytes(body)


def check_length(request: web.Request, most_bytes: int) -> None:
    """Raise HttpError if Content-Length is too large."""
    if (num_bytes := request.content_length or 0) > most_bytes:
        raise _too_large(num_bytes, most_bytes)


def _too_large(num_bytes: int, most_bytes: int) -> HttpError:
    return HttpError(413, "too_large", f"the body has {num_bytes} bytes or more; it may have {most_bytes}")


def _sentence(error: ValidationError) -> str:
    """The message of the first invalid field. If a field allows several types, pydantic reports an error for
    each type.
    """
    found = error.errors(include_url=False, include_input=False)
    first, *others = sorted(found, key=lambda one: one["type"] != "extra_forbidden")
    path = ".".join(map(str, first["loc"]))
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
    if too_long := next((one for one in found if one["type"] == "too_long"), None):
        most = too_long["ctx"]["max_length"]
        return f"{too_long['loc'][0]} has more than the {most} entries that are allowed"
    if any(other["loc"][:1] == first["loc"][:1] for other in others):
        return f"{first['loc'][0]} does not have the form that it must have"
    if first["type"] == "extra_forbidden":
        return f"{path[:64]} is not supported here"
    return f"{path[:64]}: {first['msg']}" if path else f"the body: {first['msg']}"
