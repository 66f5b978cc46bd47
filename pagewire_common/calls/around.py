"""Wraps the calls of a gRPC method, unary or streaming, in a context manager. Interceptors use this function."""

import inspect
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import grpc

Context = grpc.aio.ServicerContext[Any, Any]
Around = Callable[[Context], AbstractAsyncContextManager[None]]


def kind_of(handler: Any) -> str:
    """The attribute of a method's handler that contains its behaviour, for example unary_stream."""
    sides = (handler.request_streaming, handler.response_streaming)
    return "_".join("stream" if streams else "unary" for streams in sides)


def put_around(handler: Any, around: Around) -> Any:
    """Return a handler that runs each call inside the context manager `around`.

    The handler keeps no reference to the request, because the stack frames in gRPC's exceptions stay in memory until
    Python's collector runs.
    """
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
