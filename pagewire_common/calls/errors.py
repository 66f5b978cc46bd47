"""The errors that a client may read, and the guards that end calls with them: interceptors and a writer."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any
from urllib.parse import quote

import grpc
import structlog
from google.protobuf.message import DecodeError

from pagewire_common.calls.request_limits import (
    UNREADABLE,
    RequestLimits,
    Unparsed,
    refusing_invalid,
    refusing_large,
    refusing_unknown,
)
from pagewire_common.connection.tls import peer_names

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
Check = Callable[[grpc.HandlerCallDetails], None]
"""Checks a call by its method and metadata. Raises RequestError."""

_HEALTH = "/grpc.health."
_OPEN = "/grpc.health.v1.Health/"
"""Methods that need no API key and no client certificate, which health probes do not have."""
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
            parse = refusing_invalid(parse)
            if handler_call_details.method.startswith(_CLIENTS):
                parse = refusing_unknown(parse)
            if handler_call_details.method.startswith(_HEALTH):
                parse = refusing_large(parse, descriptor, lambda: RequestLimits(MAX_HEALTH_BYTES))
            elif self._limits is not None:
                parse = refusing_large(parse, descriptor, self._limits)
            handler = handler._replace(request_deserializer=parse)
        behavior = getattr(handler, kind)
        guard = _guard_generator if inspect.isasyncgenfunction(behavior) else _guard_coroutine
        return handler._replace(**{kind: guard(behavior)})


def _readable_in_a_stream(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def readable(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, UNREADABLE) from None

    return readable


def _guard_coroutine(behavior: Behavior) -> Behavior:
    async def call(request: Any, context: Context) -> Any:
        try:
            if isinstance(request, Unparsed):
                raise RequestError(request.code, request.reason)
            return await behavior(request, context)
        except Exception as error:
            del request
            await _abort(context, error)

    return call


def _guard_generator(behavior: Behavior) -> Behavior:
    async def call(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        try:
            if isinstance(request, Unparsed):
                raise RequestError(request.code, request.reason)
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


class Lock(grpc.aio.ServerInterceptor):
    """Refuses calls that `check` refuses, and calls from a peer whose certificate lacks the name `identity`.

    `check` is called before the request is read.
    """

    def __init__(self, check: Check | None = None, identity: str = "") -> None:
        self._check = check
        self._identity = identity

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method.startswith(_OPEN):
            return await continuation(handler_call_details)
        if self._check is not None:
            try:
                self._check(handler_call_details)
            except RequestError as error:
                return _refusing(error)
        handler = await continuation(handler_call_details)
        return handler if handler is None or not self._identity else put_around(handler, self._of_identity)

    @asynccontextmanager
    async def _of_identity(self, context: Context) -> AsyncIterator[None]:
        if self._identity not in peer_names(context):
            reason = "your certificate does not have the identity that this server accepts"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        yield


def _refusing(error: RequestError) -> Any:
    """Return a handler that refuses a call of any kind before its request has arrived."""
    code, reason = error.code, str(error)

    async def refuse(_: Any, context: Context) -> None:
        await context.abort(code, reason)

    return grpc.stream_stream_rpc_method_handler(refuse)


class PatientWriter:
    """Writes the messages of one call, which ends if a write takes too long, or if another task gives the write up.

    Only the task that creates the writer may use it, until `close`. A timeout for each write, instead of one timer for
    all, took 10 % of the time of sending.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], limit: float) -> None:
        """`limit`: seconds that the client may leave a message unread."""
        task = asyncio.current_task()
        assert task is not None
        self._context = context
        self._limit = limit
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None  # start of the write in progress
        self._error: RequestError | None = None  # the error with which `give_up` ends the current write
        self._timer = self._loop.call_later(limit, self._check)

    async def write(self, message: Any) -> None:
        """Raises RESOURCE_EXHAUSTED if the client reads too slowly, CANCELLED if it has gone, or the error of
        `give_up`.
        """
        self._began = self._loop.time()
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            if self._error is None or self._task.uncancel():
                raise
            raise RequestError(self._error.code, str(self._error)) from None
        except grpc.aio.InternalError:  # the call has ended during the write
            raise RequestError(grpc.StatusCode.CANCELLED, "the client is gone") from None
        self._began = None

    def _check(self) -> None:
        now = self._loop.time()
        due = (now if self._began is None else self._began) + self._limit
        if due > now:
            self._timer = self._loop.call_at(due, self._check)
        else:
            reason = f"the client read nothing for {self._limit:g} s"
            self.give_up(RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason))

    def give_up(self, error: RequestError) -> None:
        """End the write in progress, if there is one, with this error."""
        if self._began is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def close(self) -> None:
        self._timer.cancel()
