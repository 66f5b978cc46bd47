"""Writes to one client. A write that takes too long or is given up ends the call.

Each call has one timer that watches its writes. A timeout around each write took 10 % of the time of sending a message.
"""

import asyncio
from typing import Any

import grpc

from pagewire_common.calls.errors import RequestError


class PatientWriter:
    """The writer of a call. Until `close` the writer belongs to the task that creates it."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], limit: float) -> None:
        """`limit` is the number of seconds that the client may leave a message unread."""
        task = asyncio.current_task()
        assert task is not None
        self._context = context
        self._limit = limit
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None  # Start of the current write.
        self._error: RequestError | None = None  # Reason why the current write is given up.
        self._timer = self._loop.call_later(limit, self._check)

    async def write(self, message: Any) -> None:
        """Write a message.

        Raises RESOURCE_EXHAUSTED if the client does not read in time, CANCELLED if the client has gone, or the error of
        `give_up`.
        """
        self._began = self._loop.time()
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            if self._error is None or self._task.uncancel():
                raise
            raise RequestError(self._error.code, str(self._error)) from None
        except grpc.aio.InternalError:  # gRPC's error for a write when the call ends
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
        """End the current write with this error. If no write is in progress, this method has no effect."""
        if self._began is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def close(self) -> None:
        self._timer.cancel()
