"""Decides which failures are retried, after which pause, and for how long."""

import logging
import math
import random
import time
from collections.abc import Callable, Collection

import grpc

from pagewire_common.connection.misdirected import MisdirectedError

log = logging.getLogger("pagewire_client")

FIRST_PAUSE_SECONDS = 0.1
LAST_PAUSE_SECONDS = 2.0
# Codes of a server that is down, is shutting down, or has ended its streams. A caller's cancellation raises
# asyncio.CancelledError.
PASSING = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})


PATIENCE_HEADER = "pagewire-no-worker-timeout"
FIRST_WAIT_SECONDS = 2.0
"""Seconds that a server may wait for a worker at the first attempt. Then the user is told why the call waits."""


class Backoff:
    """The pauses between attempts of a call: each about twice as long as the one before, and random, so that many
    clients do not retry at once.

    `limit`: seconds from the first failure to the last attempt, waits for a worker included; a success starts anew. At
    0 no call is retried, and the server decides how long a call waits for a worker.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic, target: str = "") -> None:
        self._limit = limit
        self._clock = clock
        self._target = target
        self._said = ""
        self._began = clock()  # start of the current attempt
        self._offered = 0.0  # seconds that the server may wait for a worker
        self.succeeded()

    def attempt(self) -> tuple[tuple[str, str], ...]:
        """Metadata of the next call: how long the server may wait for a worker."""
        self._began, self._offered = self._clock(), 0.0
        if self._limit <= 0:
            return ()
        if self._failed_at is None:
            self._offered = min(self._limit, FIRST_WAIT_SECONDS)
        elif math.isinf(self._limit):
            return ()
        else:
            self._offered = max(0.0, self._failed_at + self._limit - self._began)
        return ((PATIENCE_HEADER, f"{self._offered:.3f}"),)

    def succeeded(self) -> None:
        self._pause = FIRST_PAUSE_SECONDS
        self._failed_at: float | None = None

    def pause(self, error: grpc.aio.AioRpcError, codes: Collection[grpc.StatusCode] = PASSING) -> float:
        """Seconds until the next attempt. Raises the error if no further attempt is allowed."""
        now = self._clock()
        if self._limit <= 0 or not passes(error, codes):
            raise error
        if self._failed_at is None:
            self._failed_at = now - min(now - self._began, self._offered)
        left = self._failed_at + self._limit - now
        if left <= 0:
            raise error
        if (said := f"{error.code().name}: {error.details()}") != self._said:
            self._said = said
            limit = "" if math.isinf(self._limit) else f" for {self._limit:g} s"
            log.info("waiting for %s: %s; trying again%s", self._target or "the server", said, limit)
        pause = min(self._pause * random.uniform(0.5, 1.0), left)
        self._pause = min(2 * self._pause, LAST_PAUSE_SECONDS)
        return pause


def passes(error: grpc.aio.AioRpcError, codes: Collection[grpc.StatusCode] = PASSING) -> bool:
    """Whether another attempt may succeed after this error."""
    return not isinstance(error, MisdirectedError) and (error.code() in codes or _is_reset(error))


def _is_reset(error: grpc.aio.AioRpcError) -> bool:
    """Whether a proxy lost its connection to the server: it resets the stream, which gRPC reports as INTERNAL."""
    return error.code() is grpc.StatusCode.INTERNAL and "RST_STREAM" in (error.details() or "")
