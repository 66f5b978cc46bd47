"""Limits how often a stream between front end and engine is written. An idle stream is written at once, a busy stream
seldom.

Each message costs the two processes 70 to 150 µs. The rows of 100 tokens in a message cost as much again. Answers,
submissions and tokens come one by one, ten for each step of 256 sequences. With the limit, ten parts are sent in one or
two messages.
"""

import asyncio

SECONDS_BETWEEN = 0.002


class Pace:
    """Limits the messages of one writer."""

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
