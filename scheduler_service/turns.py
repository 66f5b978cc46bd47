"""Who may write to its client next: readers take turns, and only a few have theirs at the same time.

A step of 256 sequences has something to say to 256 clients. If all wrote at once, workers' answers and new calls would
stand behind 256 completed writes in gRPC's one queue of events; and as gRPC takes new calls one after the other, only a
hundred a second would get in, which kept three workers half empty. So there are never more than a few writes under way,
begun in the order in which they were asked for. Where there is more to write than time, turns come later, output is
merged meanwhile, and fewer and larger messages are written.
"""

import asyncio
from collections import deque

AT_ONCE = 8
"""Turns at the same time: enough that a write is always ready, about half a millisecond of them."""
LONGEST_SECONDS = 0.02
"""After which a turn makes room for another, ended or not: its client may be slow, or have stopped reading."""
SLOW_SECONDS = 0.1
"""What took longer than this, a client took; a busy server's own delays are shorter."""


class Turns:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._asking: deque[tuple[asyncio.Future[None], bool]] = deque()
        self._given: dict[asyncio.Future[None], float] = {}  # when, in that order
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def ask(self, turn: "asyncio.Future[None]", *, is_slow: bool = False) -> None:
        """Resolve `turn` when it has come; one that is done by then, because nobody waits any more, takes none.

        `is_slow`: it took more than SLOW_SECONDS the last time. It waits as all do, and then takes nobody's place.
        """
        self._asking.append((turn, is_slow))
        self._give()

    def end(self, turn: "asyncio.Future[None]") -> None:
        """What was to be done with the turn is done. Ending one again, or one that did not come, does nothing."""
        if self._given.pop(turn, None) is not None:
            self._give()

    def _give(self) -> None:
        asking, given = self._asking, self._given
        while asking and len(given) < AT_ONCE:
            turn, is_slow = asking.popleft()
            if not turn.done():
                turn.set_result(None)
                if not is_slow:
                    given[turn] = self._loop.time()
        if asking and self._timer is None:
            self._timer = self._loop.call_at(next(iter(given.values())) + LONGEST_SECONDS, self._forget)

    def _forget(self) -> None:
        self._timer = None
        oldest = self._loop.time() - LONGEST_SECONDS
        for turn in [turn for turn, at in self._given.items() if at <= oldest]:
            del self._given[turn]
        self._give()
