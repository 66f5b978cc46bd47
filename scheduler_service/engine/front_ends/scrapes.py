"""The engine's metrics for clients of the front ends' HTTP port."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

import grpc

from pagewire.v1 import engine_service_pb2 as pb
from scheduler_service.access.keys import Keyring

MAX_AGE_SECONDS = 1.0
"""Age at which metrics are read anew, so that a flood of scrapes costs the engine one a second."""


class Scrapes:
    """`read` returns the metrics in Prometheus' text format; None before the service has set it."""

    def __init__(self, keyring: Callable[[], Keyring | None]) -> None:
        self.read: Callable[[], Awaitable[bytes]] | None = None
        self._keyring = keyring
        self._read_at = -math.inf
        self._text = b""
        self._turn = asyncio.Lock()

    async def answer(self, authorization: str) -> pb.Answer:
        """The metrics, or the refusal of a client whose API key may not read them."""
        keyring = self._keyring()
        if self.read is None or (keyring is not None and not keyring.opens_metrics(authorization)):
            reason = "an API key that may read metrics is needed"
            return pb.Answer(code=grpc.StatusCode.PERMISSION_DENIED.value[0], message=reason)
        async with self._turn:
            if time.monotonic() - self._read_at > MAX_AGE_SECONDS:
                self._read_at, self._text = time.monotonic(), await self.read()
        return pb.Answer(data=self._text)
