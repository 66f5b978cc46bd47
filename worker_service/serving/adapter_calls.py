"""Decides which adapter call may proceed: only the newest call of the newest session, as long as the call makes
progress.

No lock is held while the worker waits for the scheduler's next piece. A stalled call is ended by the next call, by a
session of a newer epoch, or by a timeout.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from pagewire.v1.worker_service_pb2 import TakeAdapterRequest
from pagewire_common.calls.errors import RequestError

STALL_SECONDS = 30.0
"""Maximum seconds until the next piece, which has at most a few MiB."""
MAX_SECONDS = 600.0
"""Maximum seconds of a whole call, twice the scheduler's own limit."""

Pieces = AsyncIterator[TakeAdapterRequest]


@dataclass(eq=False)
class _Handing:
    """The current call."""

    epoch: int
    task: asyncio.Task[None]
    end: RequestError | None = None


class AdapterCalls:
    """The adapter calls of one worker. `newest_epoch` returns the newest epoch of the worker's sessions."""

    def __init__(self, newest_epoch: Callable[[], int]) -> None:
        self._newest_epoch = newest_epoch
        self._handing: _Handing | None = None

    def check(self, epoch: int) -> int:
        """The epoch of a call, or the newest session's epoch if the call names no epoch. Raises ABORTED for an older
        epoch.
        """
        newest = self._newest_epoch()
        if 0 < epoch < newest:
            raise _aborted(f"epoch {epoch} is over: this worker has served epoch {newest}")
        return epoch or newest

    async def take(self, pieces: Pieces, load: Callable[[Pieces], Coroutine[Any, Any, None]]) -> None:
        """Load the pieces of one call. Raises RequestError, also if another call or a newer session ends this call."""
        pieces = _in_time(pieces)
        first = await anext(pieces, None)
        epoch = self.check(first.epoch if first is not None else 0)  # an older call must not end the current call
        while self._handing is not None:
            await self._end(self._handing, "another call hands an adapter over")
        epoch = self.check(epoch)  # a session may have begun in the meantime
        handing = _Handing(epoch, asyncio.create_task(load(_behind(first, pieces))))
        self._handing = handing
        try:
            await asyncio.wait((handing.task,))
        finally:
            await self._end(handing, "the call is over")
        if handing.end is not None and handing.task.cancelled():
            raise handing.end
        handing.task.result()

    def end_older(self) -> None:
        """End the adapter call of an older session, because a new session has begun."""
        if self._handing is not None and self._handing.epoch < (newest := self._newest_epoch()):
            self._cancel(self._handing, f"superseded by epoch {newest}")

    async def _end(self, handing: _Handing, reason: str) -> None:
        self._cancel(handing, reason)
        await asyncio.wait((handing.task,))

    def _cancel(self, handing: _Handing, reason: str) -> None:
        if self._handing is handing:
            self._handing = None
            handing.end = _aborted(reason)
            handing.task.cancel()


async def _in_time(pieces: Pieces) -> Pieces:
    """The pieces as they arrive. Raises DEADLINE_EXCEEDED for a late piece, INVALID_ARGUMENT for an empty piece."""
    loop = asyncio.get_running_loop()
    end, is_first = loop.time() + MAX_SECONDS, True
    while True:
        try:
            async with asyncio.timeout_at(min(end, loop.time() + STALL_SECONDS)):
                piece = await anext(pieces, None)
        except TimeoutError:
            raise RequestError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"an adapter's next piece may take {STALL_SECONDS:g} s, and all of it {MAX_SECONDS:g} s",
            ) from None
        if piece is None:
            return
        if not (is_first or piece.data):
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, "data: a piece behind the first one has none")
        is_first = False
        yield piece


async def _behind(first: TakeAdapterRequest | None, pieces: Pieces) -> Pieces:
    if first is not None:
        yield first
    async for piece in pieces:
        yield piece


def _aborted(reason: str) -> RequestError:
    """An error with status ABORTED. The scheduler may send the adapter again, because the adapter has no fault."""
    return RequestError(grpc.StatusCode.ABORTED, reason)
