"""Whether any worker takes requests, and how long none has.

In an outage requests wait for a limited time, and health stays SERVING as long. A worker may be back in a moment, so
new requests are worth accepting. A server that left its load balancer at once would turn pauses into errors. When
waiting requests begin to end with UNAVAILABLE, health changes, and clients should go elsewhere.
"""

import asyncio
from collections.abc import AsyncIterator


class Outage:
    """An outage, which `set` begins and ends. It lasts until the first worker takes requests."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._began, self._ended = asyncio.Event(), asyncio.Event()
        self._began.set()

    @property
    def is_on(self) -> bool:
        return self._began.is_set()

    def set(self, is_on: bool) -> None:
        if is_on == self.is_on:
            return
        begins, ends = (self._began, self._ended) if is_on else (self._ended, self._began)
        begins.set()
        ends.clear()

    async def watch_health(self) -> AsyncIterator[bool]:
        """Whether clients should send requests here: first when that is true, then whenever it changes, for ever."""
        while True:
            await self._ended.wait()
            yield True
            while await self._ends_in_time(self._patience):
                pass
            yield False

    async def lasts(self, seconds: float) -> None:
        """Return when an outage has lasted for `seconds`, counted from now or its beginning."""
        while await self._ends_in_time(seconds):
            pass

    async def _ends_in_time(self, seconds: float) -> bool:
        """Wait through the next outage; returns False if it lasts longer than `seconds`."""
        await self._began.wait()
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            return False
        return True
