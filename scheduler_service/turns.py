"""Who may write to its client next: readers take turns, a few of them in each pass of the event loop.

A step of 256 sequences has something to say to 256 clients, and a write takes ten times as long as planning for one. If
all wrote at once, the next step of a worker that waits would come after them. So steps go first: between two passes
there are never more than a few writes, in the order in which they were asked for. Where there is more to write than
time, turns come later, output is merged meanwhile, and fewer and larger messages are written.
"""

import asyncio
from collections import deque

A_PASS = 8
"""Writes in a pass of the event loop, about half a millisecond of them."""


class Turns:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._asking: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    def ask(self, turn: "asyncio.Future[None]") -> None:
        """Resolve `turn` when it has come; one that is done by then, because nobody waits any more, takes none."""
        self._asking.append(turn)
        if not self._is_due:
            self._is_due = True
            turn.get_loop().call_soon(self._give, turn.get_loop())

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        asking, given = self._asking, 0
        while asking and given < A_PASS:
            turn = asking.popleft()
            if not turn.done():
                turn.set_result(None)
                given += 1
        self._is_due = bool(asking)
        if asking:
            loop.call_soon(self._give, loop)
