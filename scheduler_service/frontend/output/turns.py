"""Decides which stream writes to its client next: streams take turns, and only a few streams have a turn at a time.

A step of 256 sequences brings tokens for 256 clients. If all streams wrote at once, workers' answers and new calls
would wait behind 256 completed writes in gRPC's single queue of events. gRPC accepts new calls one after the other, so
behind these writes it would accept only 100 calls a second. At 100 new calls a second, three workers ran with
half-empty batches. For this reason, only a few streams write at a time, in the order in which they asked for a turn.
Under high load, a stream waits longer for its turn and merges its output meanwhile, so it writes fewer and larger
messages.

A client that does not read, or reads slowly, does not delay other clients. If a client does not finish its turn within
a timeout, the turn no longer counts towards the limit of turns. The next turns of a client whose turn timed out do not
count either, until one of them is quick again. When all turns time out (many frozen clients), the timeout is halved,
down to 1 ms.
"""

import asyncio
from collections import deque

AT_ONCE = 8
"""Largest number of streams that have a turn at the same time. Eight turns take about 0.5 ms, which is enough to keep
gRPC busy with writes.
"""
LONGEST_SECONDS = 0.02
SHORTEST_SECONDS = 0.001
SLOW_AFTER = 4 * AT_ONCE
"""A client counts as slow if more than `SLOW_AFTER` turns of other clients start during its turn. The delay of a client
is measured in turns and not in seconds, because no turns start while the server itself is delayed.
"""


class Turn:
    """The turn of a stream's reader. A reader uses the same `Turn` for all its turns."""

    __slots__ = ("came", "is_slow", "number")

    def __init__(self) -> None:
        self.came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A future that is resolved when the reader's turn comes. If the reader has left before, the future is already
        done, and the turn does not count towards the limit of turns.
        """
        self.number = 0  # number of the current turn; 0 between turns
        self.is_slow = False


class Turns:
    """Gives turns to the readers of streams. Use one `Turns` object for each event loop."""

    def __init__(self) -> None:
        self._asking: deque[Turn] = deque()
        self._given: dict[Turn, float] = {}  # start times of the turns that count towards the limit; oldest first
        self._num_given = 0
        self._longest = LONGEST_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def num_held(self) -> int:
        """Number of running turns that count towards the limit `AT_ONCE`."""
        return len(self._given)

    def ask(self, turn: Turn) -> None:
        """Request a turn for a reader; `turn.came` is resolved when the turn comes."""
        self._asking.append(turn)
        self._give()

    def end(self, turn: Turn) -> None:
        """End a turn. If the turn is not running, `end` has no effect."""
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
