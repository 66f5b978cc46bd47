"""Which stream writes to its client next: readers take turns, and only a few turns are under way at the same time.

A step of 256 sequences brings tokens for 256 clients. If all streams wrote at once, workers' answers and new calls
would wait behind 256 completed writes in gRPC's one queue of events. As gRPC takes new calls one after the other, only
a hundred a second would get in, which kept three workers half empty. So only a few writes are under way at a time, and
they begin in the order in which they were asked for. When there is more to write than time, turns come later, output is
merged meanwhile, and fewer and larger messages are written.

A client that reads slowly, or not at all, delays no other: after a time limit its turn no longer counts towards those
under way, and its next turns do not count at all until one is quick again. The limit gets shorter while turns end by it
alone, as when many clients freeze at once.
"""

import asyncio
from collections import deque

AT_ONCE = 8
"""Turns at the same time: enough that a write is always ready, about half a millisecond of them."""
LONGEST_SECONDS = 0.02
SHORTEST_SECONDS = 0.001
SLOW_AFTER = 4 * AT_ONCE
"""A client is slow if more turns than these were given during one of its own. Counted in turns and not in seconds,
because a delay of the server itself gives none."""


class Turn:
    """One reader's turn. The same object serves for all its turns, one after the other."""

    __slots__ = ("came", "is_slow", "number")

    def __init__(self) -> None:
        self.came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the present turn comes. A turn whose future is already done, because its reader left, does not
        count towards the limit."""
        self.number = 0  # of the present turn, once it came
        self.is_slow = False


class Turns:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._asking: deque[Turn] = deque()
        self._given: dict[Turn, float] = {}  # turns that count towards the limit, and when each came; oldest first
        self._num_given = 0
        self._longest = LONGEST_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def num_held(self) -> int:
        """Turns that came, did not end, and count towards the limit."""
        return len(self._given)

    def ask(self, turn: Turn) -> None:
        """Resolve `turn.came` when it has come."""
        self._asking.append(turn)
        self._give()

    def end(self, turn: Turn) -> None:
        """The turn is over. Ending one again, or one that did not come, does nothing."""
        if turn.number:
            turn.is_slow = self._num_given - turn.number > SLOW_AFTER
            turn.number = 0
            if self._given.pop(turn, None) is not None:
                self._longest = LONGEST_SECONDS
                self._give()

    def _give(self) -> None:
        asking, given = self._asking, self._given
        while asking and len(given) < AT_ONCE:
            turn = asking.popleft()
            if not turn.came.done():
                turn.came.set_result(None)
                self._num_given += 1
                turn.number = self._num_given
                if not turn.is_slow:
                    given[turn] = self._loop.time()
        if asking and self._timer is None:
            self._timer = self._loop.call_at(next(iter(given.values())) + self._longest, self._forget)

    def _forget(self) -> None:
        self._timer = None
        oldest = self._loop.time() - self._longest
        forgotten = [turn for turn, at in self._given.items() if at <= oldest]
        for turn in forgotten:
            del self._given[turn]
        if len(forgotten) == AT_ONCE:
            self._longest = max(SHORTEST_SECONDS, self._longest / 2)
        self._give()
