"""Limits how often a stream between front end and engine is written. A message on an idle stream is written at once. On
a busy stream, parts are collected into one message every 2 ms.

Each message costs the two processes together 70 to 150 µs. The tokens of 100 sequences in a message cost a further 70
to 150 µs. The parts of messages (answers, submissions and tokens) arise one by one: ten parts in each step of 256
sequences. With the limit, these ten parts are sent in one or two messages.
"""

import asyncio

SECONDS_BETWEEN = 0.002


class Pace:
    """Limits how often one writer sends a message."""

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
