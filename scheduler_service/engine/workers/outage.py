"""Whether any worker accepts requests, and how long no worker has accepted requests.

In an outage requests wait for a limited time, and health stays SERVING for the same time. New requests are accepted,
because a worker may return in a moment. If the server left its load balancer at once, short pauses would become errors.
When waiting requests begin to end with UNAVAILABLE, health changes, and clients should use other servers.
"""

import asyncio
from collections.abc import AsyncIterator


class Outage:
    """An outage. `set` begins and ends the outage. At the start of the server an outage lasts until the first worker
    accepts requests.
    """

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
        """Yield whether clients should send requests to this server. The first value is True, as soon as a worker
        serves. Each change yields a further value.
        """
        while True:
            await self._ended.wait()
            yield True
            while await self._ends_in_time(self._patience):
                pass
            yield False

    async def lasts(self, seconds: float) -> None:
        """Return when an outage has lasted for `seconds`. The time begins with this call, or with the outage if the
        outage begins later.
        """
        while await self._ends_in_time(seconds):
            pass

    async def _ends_in_time(self, seconds: float) -> bool:
        """Wait for the next outage and for its end. Returns False if the outage lasts longer than `seconds`."""
        await self._began.wait()
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            return False
        return True
