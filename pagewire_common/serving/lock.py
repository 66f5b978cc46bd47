"""The lock on a server's port, which checks every call except health checks before the request is read."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from pagewire_common.calls.errors import Context, RequestError, put_around
from pagewire_common.connection.tls import peer_names

_OPEN = "/grpc.health.v1.Health/"
"""Health probes have no API keys and no client certificates."""

Check = Callable[[grpc.HandlerCallDetails], None]
"""Checks a call by its method and metadata. Raises RequestError."""


class Lock(grpc.aio.ServerInterceptor):
    """Refuses calls that `check` refuses, and calls from a peer whose certificate lacks the name `identity`."""

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
