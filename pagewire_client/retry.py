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
# Status codes of a server that is down, is shutting down, or has ended its streams. If the caller cancels a call,
# asyncio.CancelledError is raised and not the status CANCELLED.
PASSING = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})


PATIENCE_HEADER = "pagewire-no-worker-timeout"
FIRST_WAIT_SECONDS = 2.0
"""At the first attempt of a call: maximum seconds that the server may wait for a worker. After this time the user is
told why the call waits.
"""


class Backoff:
    """The pauses between two attempts of a call. Each pause is about twice as long as the pause before it. The length
    of a pause is random, so that many clients do not retry at the same time.

    `limit` is the maximum number of seconds from the first failure to the last attempt. The time that a server waits
    for a worker counts towards `limit`. A successful attempt sets the measured time back to 0. If `limit` is 0, no call
    is retried, and the server decides how long a call waits for a worker. Log messages contain `target`.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic, target: str = "") -> None:
        self._limit = limit
        self._clock = clock
        self._target = target
        self._said = ""
        self._began = clock()  # Start of the current attempt to call.
        self._offered = 0.0  # Seconds that the server may wait for a worker in the current attempt.
        self.succeeded()

    def attempt(self) -> tuple[tuple[str, str], ...]:
        """Metadata of the next call: how long the server may hold the call while no worker accepts requests."""
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
    """Whether another attempt to call may succeed after this error."""
    return not isinstance(error, MisdirectedError) and (error.code() in codes or _is_reset(error))


def _is_reset(error: grpc.aio.AioRpcError) -> bool:
    """Whether the error means that a proxy lost its connection to the server. A proxy can only reset a stream that has
    begun, and gRPC reports the reset as INTERNAL.
    """
    return error.code() is grpc.StatusCode.INTERNAL and "RST_STREAM" in (error.details() or "")
