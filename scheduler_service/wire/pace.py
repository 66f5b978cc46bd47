"""How often a stream between front end and engine is written: at once if it was idle, and seldom if it is busy.

A message costs 70 to 150 µs of the two processes, whatever its content, as much as the rows of 100 tokens. Answers,
submissions and tokens come one by one, ten for each step of 256 sequences; together they are one or two messages.
"""

import asyncio

SECONDS_BETWEEN = 0.002


class Pace:
    """Belongs to one writer."""

    __slots__ = ("_last", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = 0.0

    async def wait(self) -> None:
        """Return when the next message may be written."""
        pause = self._last + SECONDS_BETWEEN - self._loop.time()
        if pause > 0:
            await asyncio.sleep(pause)
        self._last = self._loop.time()
