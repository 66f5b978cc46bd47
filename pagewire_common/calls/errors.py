"""The errors that a client may read, and the interceptor that hides all other errors."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote

import grpc
import structlog
from google.protobuf.message import DecodeError

from pagewire_common.calls.around import kind_of
from pagewire_common.calls.field_count import has_more_fields, num_opaque_bytes, unknown_field

log = structlog.get_logger()

MAX_STATUS_BYTES = 4096
"""Maximum size of an error's message in bytes, in the encoding of a header."""


class RequestError(Exception):
    """An error that ends a call with this gRPC status and message."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


Behavior = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Any]


MAX_FIELDS = 6 << 10
"""Maximum number of fields of a request. A valid request never reaches this number, even if all its lists have their
maximum length. A message with this number of fields can be counted and parsed quickly.
"""


request_size: ContextVar[int] = ContextVar("request_size", default=0)
"""Size of this call's serialized request in bytes.

The size that the parsed message reports may be smaller. If a field comes twice, protobuf shows only the last value, but
the first value stays in memory until the call ends.
"""


class _Unparsed(NamedTuple):
    """A placeholder for a request that would take too long to parse."""

    reason: str
    code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT

    def refuse(self) -> NoReturn:
        raise RequestError(self.code, self.reason)


class RequestLimits(NamedTuple):
    """The limits that currently apply to a request's message."""

    num_bytes: int
    num_opaque_bytes: int = 0
    """Additional bytes for fields that are not parsed, for example the field of a sound."""
    will_grow: str = ""
    """The reason why a request above these limits may be accepted later; an empty text if such a request is never
    accepted.
    """


_HEALTH = "/grpc.health."
_SERVED = ("/pagewire.", "/vllm.", _HEALTH, "/grpc.reflection.")
_CLIENTS = ("/pagewire.v1.InferenceService/", "/pagewire.v1.AdminService/")
"""Prefixes of the methods that clients of any release call. For calls between services, a check of the protocol version
replaces the check of fields.
"""
MAX_HEALTH_BYTES = 256
"""Maximum size of a service's name in a health check in bytes. Every caller may send a health check."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns RequestError into its status, and any other uncaught error into INTERNAL without details.

    Without this interceptor gRPC would send an uncaught exception's text to the client. With `limits`, a request that
    is too large or has too many fields is refused before it is parsed, because parsing holds the interpreter's lock.
    """

    def __init__(self, limits: Callable[[], RequestLimits] | None = None) -> None:
        self._limits = limits

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_SERVED):
            return handler
        kind = kind_of(handler)
        if (parse := handler.request_deserializer) is None:
            pass
        elif handler.request_streaming:
            handler = handler._replace(request_deserializer=_readable_in_a_stream(parse))
        else:
            descriptor = parse.__self__.DESCRIPTOR  # `parse` is a generated message's method FromString
            parse = _readable(parse)
            if handler_call_details.method.startswith(_CLIENTS):
                parse = _known(parse)
            if handler_call_details.method.startswith(_HEALTH):
                parse = _bounded(parse, descriptor, lambda: RequestLimits(MAX_HEALTH_BYTES))
            elif self._limits is not None:
                parse = _bounded(parse, descriptor, self._limits)
            handler = handler._replace(request_deserializer=parse)
        behavior = getattr(handler, kind)
        guard = _guard_generator if inspect.isasyncgenfunction(behavior) else _guard_coroutine
        return handler._replace(**{kind: guard(behavior)})


_UNREADABLE = "the request's bytes are no message of this method"


def _readable_in_a_stream(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a parser for a stream of requests. The error of an invalid request is raised when the RPC's method reads
    the request.
    """

    def readable(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, _UNREADABLE) from None

    return readable


def _readable(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a parser that returns `_Unparsed` for invalid bytes. If a parser raises an exception, gRPC reports UNKNOWN
    with the exception's message.
    """

    def readable(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _Unparsed(_UNREADABLE)

    return readable


def _known(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a parser that refuses requests with unknown fields: an answer that ignores these fields would be wrong."""

    def known(data: bytes) -> Any:
        request = parse(data)
        if not isinstance(request, _Unparsed) and (found := unknown_field(request)):
            return _Unparsed(
                f"the request has {found}, which this server does not know: leave it out, or ask a newer one"
            )
        return request

    return known


def _bounded(
    parse: Callable[[bytes], Any], descriptor: Any, limits: Callable[[], RequestLimits]
) -> Callable[[bytes], Any]:
    def bounded(data: bytes) -> Any:
        most, most_opaque, will_grow = limits()
        if len(data) > most and len(data) - min(num_opaque_bytes(data, descriptor), most_opaque) > most:
            reason = f"the request has {len(data)} bytes; at most {most} are allowed here"
            if will_grow:
                return _Unparsed(f"{reason} {will_grow}", grpc.StatusCode.UNAVAILABLE)
            return _Unparsed(reason)
        if has_more_fields(data, descriptor, MAX_FIELDS):
            return _Unparsed(
                f"the request has more than {MAX_FIELDS} fields, entries of lists such as chat.messages among them; "
                "send shorter lists, and packed ones of numbers"
            )
        request_size.set(len(data))
        return parse(data)

    return bounded


def _guard_coroutine(behavior: Behavior) -> Behavior:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            if isinstance(request, _Unparsed):
                request.refuse()
            return await behavior(request, context)
        except Exception as error:
            del request
            await _abort(context, error)

    return call


def _guard_generator(behavior: Behavior) -> Behavior:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[Any, None]:
        try:
            if isinstance(request, _Unparsed):
                request.refuse()
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await _abort(context, error)

    return call


def _short(sentence: str) -> str:
    """Cut an error's message to the maximum size of a gRPC status message. The message may quote a client's input or a
    model's file.

    gRPC sends the message in a header, percent-encoded. Many gRPC libraries drop calls whose headers are larger than 8
    KiB.
    """
    short = sentence[:MAX_STATUS_BYTES]
    while len(quote(short)) > MAX_STATUS_BYTES:
        short = short[: len(short) // 2]
    return sentence if short == sentence else f"{short}…"


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    """End a call with an error.

    The exception that gRPC raises here refers to itself, so the exception and its objects stay in memory until Python's
    collector runs. These objects must not include the request or the stack frames of `error`.
    """
    if isinstance(error, RequestError):
        error.__traceback__ = error.__context__ = None
        try:
            await context.abort(error.code, _short(str(error)))
        except grpc.aio.InternalError:  # the client is gone, or has not read a message
            log.info("call cancelled", code=error.code.name, reason=str(error))
            raise asyncio.CancelledError from None  # after the failed abort, gRPC accepts only a cancellation
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, NotImplementedError):  # a method that the servicer does not implement
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not implement the method")
    log.error("call failed", exc_info=error)
    error.__traceback__ = error.__context__ = None
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")
