"""Decides which call of TakeAdapter may load an adapter: only the newest call of the newest session, while pieces
arrive in time. A waiting call holds no lock: the next call, a newer session or a timeout ends the waiting call."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from pagewire.v1.worker_service_pb2 import TakeAdapterRequest
from pagewire_common.calls.errors import RequestError

STALL_SECONDS = 30.0
"""Seconds that a call waits for the next piece of at most a few MiB."""
MAX_SECONDS = 600.0
"""Seconds of a whole call, twice the scheduler's limit."""

Pieces = AsyncIterator[TakeAdapterRequest]


@dataclass(eq=False)
class _Handing:
    """The call that is loading an adapter."""

    epoch: int
    task: asyncio.Task[None]
    end: RequestError | None = None


class AdapterCalls:
    """The calls of TakeAdapter and DropAdapter of one worker."""

    def __init__(self, newest_epoch: Callable[[], int]) -> None:
        self._newest_epoch = newest_epoch
        self._handing: _Handing | None = None

    def check(self, epoch: int) -> int:
        """The epoch that a call names, by default the newest. Raises RequestError with status ABORTED for an older
        epoch."""
        newest = self._newest_epoch()
        if 0 < epoch < newest:
            raise _aborted(f"epoch {epoch} is over: this worker has served epoch {newest}")
        return epoch or newest

    async def take(self, pieces: Pieces, load: Callable[[Pieces], Coroutine[Any, Any, None]]) -> None:
        """Pass the pieces of a call to `load`. Raises RequestError, for example if another call or a newer session ends
        this call."""
        pieces = _in_time(pieces)
        first = await anext(pieces, None)
        epoch = self.check(first.epoch if first is not None else 0)  # checked before the current call is ended
        while self._handing is not None:
            await self._end(self._handing, "another call of TakeAdapter has begun")
        epoch = self.check(epoch)  # a new session may have begun
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
        """End the current call if it belongs to an older session."""
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
    """Raises RequestError: DEADLINE_EXCEEDED if a piece is late, INVALID_ARGUMENT if a piece after the first has no
    data."""
    loop = asyncio.get_running_loop()
    end, is_first = loop.time() + MAX_SECONDS, True
    while True:
        try:
            async with asyncio.timeout_at(min(end, loop.time() + STALL_SECONDS)):
                piece = await anext(pieces, None)
        except TimeoutError:
            raise RequestError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"an adapter's next piece may take {STALL_SECONDS:g} s, and the whole adapter {MAX_SECONDS:g} s",
            ) from None
        if piece is None:
            return
        if not (is_first or piece.data):
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, "data: a piece after the first has none")
        is_first = False
        yield piece


async def _behind(first: TakeAdapterRequest | None, pieces: Pieces) -> Pieces:
    if first is not None:
        yield first
    async for piece in pieces:
        yield piece


def _aborted(reason: str) -> RequestError:
    """ABORTED: the adapter has no fault, and the scheduler may send it again."""
    return RequestError(grpc.StatusCode.ABORTED, reason)
