"""Writes a log line (method, key id of the caller, status) for each call whose method writes no log line itself.

The line contains no key, and from the request only names passed to `note`. Of calls without a valid key, which could
fill the log, only a few are logged and the rest counted.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import structlog

from pagewire_common.calls.errors import Context, put_around
from scheduler_service.access.caller import caller
from scheduler_service.access.refusals import Refusals

log = structlog.get_logger()

MAX_NOTED = 256
MAX_REFUSED = 20
"""Calls without a valid key that are logged in each period of `PERIOD_SECONDS`."""
PERIOD_SECONDS = 10.0
_HEALTH = "/grpc.health.v1.Health/"
_REFUSED = (
    *(grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND),
    *(grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ALREADY_EXISTS),
    *(grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.CANCELLED),
)
"""Statuses of calls that count as refused. A call that its client left may not have been admitted yet."""


@dataclass(slots=True)
class CallLine:
    """The log line of one call. `is_written`: the call's method writes a more detailed line itself.

    `http_status`: over HTTP, a function that returns the HTTP status for the call's gRPC status.
    """

    names: dict[str, str] = field(default_factory=dict)
    is_written: bool = False
    http_status: Callable[[str], int] | None = None


_line: ContextVar[CallLine | None] = ContextVar("line", default=None)


def note(**names: str) -> None:
    """Add names (such as a worker's address) to the log line of the current call."""
    if (line := _line.get()) is not None:
        line.names = {name: value[:MAX_NOTED] for name, value in names.items()}


def leave_own_line() -> None:
    """Write no audit line for the current call, because its method writes a more detailed log line."""
    if (line := _line.get()) is not None:
        line.is_written = True


def statuses(name: str) -> dict[str, Any]:
    """The status of the current call for a log line, by the name of its gRPC status."""
    line = _line.get()
    over_http = {} if line is None or line.http_status is None else {"http_status": line.http_status(name)}
    return {"status": name} | over_http


def begin_line(http_status: Callable[[str], int] | None = None) -> CallLine:
    """Begin the log line of a call in this context, and in the tasks that the call creates."""
    line = CallLine(http_status=http_status)
    _line.set(line)
    return line


class Lines:
    """Writes the lines of ended calls. Create the object inside the event loop."""

    def __init__(self) -> None:
        self._num_refused = 0  # calls without a valid key in the current period

    def write(self, line: CallLine, *, has_key: bool, **values: Any) -> None:
        """Write the line of a call, unless the call has written a line. `has_key`: the caller's key was accepted."""
        if line.is_written:
            return
        if not has_key:
            if not self._num_refused:
                asyncio.get_running_loop().call_later(PERIOD_SECONDS, self._end_period)
            self._num_refused += 1
            if self._num_refused > MAX_REFUSED:
                return
        names = dict(line.names)
        if (key := caller.get()) is not None:
            names |= {"tenant": key.tenant, "api_key": key.id}
        log.info("call closed", **values, **names)

    def _end_period(self) -> None:
        if self._num_refused > MAX_REFUSED:
            log.warning(
                "more calls without a valid key", not_logged=self._num_refused - MAX_REFUSED, seconds=PERIOD_SECONDS
            )
        self._num_refused = 0


class Audit(grpc.aio.ServerInterceptor):
    """The outermost interceptor of a gRPC server, which also counts refused calls. Create it inside the event loop."""

    def __init__(self, refusals: Refusals | None = None) -> None:
        self._lines = Lines()
        self._refusals = refusals or Refusals()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or method.startswith(_HEALTH):
            return handler
        return put_around(handler, partial(self._watched, method))

    @contextlib.asynccontextmanager
    async def _watched(self, method: str, context: Context) -> AsyncIterator[None]:
        # gRPC crashes if `peer` is called after the end of a call.
        began, status, peer = time.monotonic(), grpc.StatusCode.OK, context.peer()
        line = begin_line()
        try:
            yield
        except asyncio.CancelledError:
            status = grpc.StatusCode.CANCELLED
            raise
        except BaseException:
            status = grpc.StatusCode.UNKNOWN
            raise
        finally:
            status = context.code() or status  # a code that is not set is None, despite its type
            if status in _REFUSED:
                self._refusals.count(caller.get(), time.monotonic())
            self._lines.write(
                line,
                has_key=status is not grpc.StatusCode.UNAUTHENTICATED,
                method=method,
                status=status.name,
                peer=peer,
                total_seconds=round(time.monotonic() - began, 6),
            )
