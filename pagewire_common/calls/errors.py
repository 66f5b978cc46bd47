"""The errors that a client may read, the interceptor that hides all other errors, and a wrapper of gRPC methods."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote

import grpc
import structlog
from google.protobuf.message import DecodeError

from pagewire_common.calls.field_count import has_more_fields, num_opaque_bytes, unknown_field

log = structlog.get_logger()

MAX_STATUS_BYTES = 4096
"""Bytes of an error's message, in the encoding of a header."""


class RequestError(Exception):
    """An error that ends a call with this gRPC status and message."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


Context = grpc.aio.ServicerContext[Any, Any]
Behavior = Callable[[Any, Context], Any]
Around = Callable[[Context], AbstractAsyncContextManager[None]]


MAX_FIELDS = 6 << 10
"""Fields of a request, quickly counted and parsed: more than a valid request with lists of maximum length has."""


request_size: ContextVar[int] = ContextVar("request_size", default=0)
"""Bytes of this call's serialized request. The parsed message reports less if a single field is repeated, but keeps
all.
"""


class _Unparsed(NamedTuple):
    """A placeholder for a request that would take too long to parse."""

    reason: str
    code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT

    def refuse(self) -> NoReturn:
        raise RequestError(self.code, self.reason)


class RequestLimits(NamedTuple):
    num_bytes: int
    num_opaque_bytes: int = 0
    """Additional bytes of fields that are not parsed, such as a sound."""
    will_grow: str = ""
    """Why a larger request may be accepted later; empty if it never is."""


_HEALTH = "/grpc.health."
_SERVED = ("/pagewire.", "/vllm.", _HEALTH, "/grpc.reflection.")
_CLIENTS = ("/pagewire.v1.InferenceService/", "/pagewire.v1.AdminService/")
"""Prefixes of the methods that clients of any release call. Services check the protocol's version instead of fields."""
MAX_HEALTH_BYTES = 256
"""Bytes of a service's name in a health check, which every caller may send."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns RequestError into its status, and any other uncaught error into INTERNAL without details.

    With `limits`, a request with too many bytes or fields is refused before parsing, which holds the GIL.
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


_UNREADABLE = "the request's bytes are not a valid message of this method"


def _readable_in_a_stream(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def readable(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, _UNREADABLE) from None

    return readable


def _readable(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a parser that returns `_Unparsed` for invalid bytes: gRPC would send an exception's text to the client."""

    def readable(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _Unparsed(_UNREADABLE)

    return readable


def _known(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a parser that refuses unknown fields, because an answer that ignores them would be wrong."""

    def known(data: bytes) -> Any:
        request = parse(data)
        if not isinstance(request, _Unparsed) and (found := unknown_field(request)):
            return _Unparsed(
                f"the request has {found}, which this server does not know: leave it out, or use a newer server"
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
                f"the request has more than {MAX_FIELDS} fields, counting entries of lists such as chat.messages; "
                "send shorter lists, and pack lists of numbers"
            )
        request_size.set(len(data))
        return parse(data)

    return bounded


def _guard_coroutine(behavior: Behavior) -> Behavior:
    async def call(request: Any, context: Context) -> Any:
        try:
            if isinstance(request, _Unparsed):
                request.refuse()
            return await behavior(request, context)
        except Exception as error:
            del request
            await _abort(context, error)

    return call


def _guard_generator(behavior: Behavior) -> Behavior:
    async def call(request: Any, context: Context) -> AsyncGenerator[Any, None]:
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
    """Cut an error's message. Many gRPC libraries drop calls with headers above 8 KiB; this one is percent-encoded."""
    short = sentence[:MAX_STATUS_BYTES]
    while len(quote(short)) > MAX_STATUS_BYTES:
        short = short[: len(short) // 2]
    return sentence if short == sentence else f"{short}…"


async def _abort(context: Context, error: Exception) -> None:
    """End a call with an error.

    gRPC's exception stays in memory until Python's collector runs, so it must not refer to the request or to `error`'s
    frames.
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


def kind_of(handler: Any) -> str:
    """The attribute of a method's handler that contains its behaviour, for example unary_stream."""
    sides = (handler.request_streaming, handler.response_streaming)
    return "_".join("stream" if streams else "unary" for streams in sides)


def put_around(handler: Any, around: Around) -> Any:
    """Run each call inside the context manager `around`, without keeping the request in gRPC's exceptions."""
    kind = kind_of(handler)
    behavior = getattr(handler, kind)

    async def call(request: Any, context: Context) -> Any:
        async with around(context):
            answering = behavior(request, context)
            del request
            return await answering

    async def call_generator(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        async with around(context):
            answering = behavior(request, context)
            del request
            async with aclosing(answering) as responses:
                async for response in responses:
                    yield response

    return handler._replace(**{kind: call_generator if inspect.isasyncgenfunction(behavior) else call})
