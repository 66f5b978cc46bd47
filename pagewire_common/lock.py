"""The lock on a server's port: every call but health's is checked, before its request is read."""

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from pagewire_common.errors import RequestError, kind_of
from pagewire_common.tls import peer_names

_OPEN = "/grpc.health.v1.Health/"
"""Probes have neither keys nor certificates of ours."""

Check = Callable[[grpc.HandlerCallDetails], None]
"""Of a call by its method and metadata; raises RequestError."""


class Lock(grpc.aio.ServerInterceptor):
    """Refuses calls that `check` refuses, and calls of a peer whose certificate does not have the name `identity`."""

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
        return handler if handler is None or not self._identity else self._guarded(handler)

    def _guarded(self, handler: Any) -> Any:
        kind = kind_of(handler)
        behavior = getattr(handler, kind)

        async def check(context: grpc.aio.ServicerContext[Any, Any]) -> None:
            if self._identity not in peer_names(context):
                reason = "this server takes calls of another identity than your certificate's"
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await check(context)
            return await behavior(request, context)

        async def call_generator(
            request: Any, context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncGenerator[Any, None]:
            await check(context)
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

        return handler._replace(**{kind: call_generator if inspect.isasyncgenfunction(behavior) else call})


def _refusing(error: RequestError) -> Any:
    """Ends a call of any kind at once; one that streams its request may not have sent it yet."""
    code, reason = error.code, str(error)

    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(code, reason)

    return grpc.stream_stream_rpc_method_handler(refuse)
