"""Output streams to clients, which take turns at writing.

Unread deltas of a stream are merged up to a size limit, and each is sent as one gRPC message. A token and its text are
in the same delta, because a client may resume a broken stream after any message.

Only a few streams have a turn at a time. When 256 streams wrote at once, answers and new calls waited behind the writes
in gRPC's single queue of events: gRPC accepted only 100 calls a second, and workers ran with half-empty batches.

A turn beyond a timeout no longer counts towards the limit of turns, nor do this client's next turns until one is quick
again. When all turns time out (many frozen clients), the timeout is halved, down to 1 ms.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pagewire_common.calls.errors import RequestError
from scheduler_service.core import SequenceStatus
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.frontend.output.request_memory import UnreadOutput, logprob_bytes, output_bytes

MAX_TOKENS = 2048
MAX_CHARACTERS = 1 << 16
MAX_LOGPROBS = 1024
"""Log-probabilities at which a delta is full; a merged delta may have twice as many. Encoding one takes 2.6 µs. The
limits of tokens, characters and log-probabilities keep messages below 0.3 MB.
"""
MAX_VECTOR_BYTES = 1 << 20
"""Bytes of vectors at which a delta is full."""
AT_ONCE = 8
"""Largest number of turns at the same time. Eight turns take about 0.5 ms, enough to keep gRPC busy with writes."""
LONGEST_SECONDS = 0.02
SHORTEST_SECONDS = 0.001
SLOW_AFTER = 4 * AT_ONCE
"""Turns that start during a slow client's turn. Seconds would not do: no turns start while the server is delayed."""


@dataclass(slots=True)
class OutputDelta:
    """A part of one output that is not yet sent. `status` is set if the output has ended."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    status: SequenceStatus | None = None
    stop: str | int | None = None
    """The stop string or stop token that ended the output."""
    num_output_tokens: int = 0
    vectors: bytes = b""

    @property
    def is_full(self) -> bool:
        return (
            len(self.token_ids) >= MAX_TOKENS
            or len(self.text) >= MAX_CHARACTERS
            or len(self.vectors) >= MAX_VECTOR_BYTES
            or _size(self.logprobs) + _size(self.prompt_logprobs) >= MAX_LOGPROBS
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the delta. Prompt log-probabilities and vectors are counted with the request."""
        num_bytes = output_bytes(len(self.token_ids), len(self.text))
        if self.logprobs:
            num_bytes += logprob_bytes(len(self.logprobs), len(self.logprobs[0].token_ids))
        return num_bytes

    def merge(self, later: "OutputDelta") -> None:
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.status = later.status
        self.stop = later.stop
        self.num_output_tokens = later.num_output_tokens
        self.vectors += later.vectors


def _size(logprobs: Sequence[TokenLogprobs]) -> int:
    return len(logprobs) * len(logprobs[0].token_ids) if logprobs else 0


class Turn:
    """The turn of a stream's reader, which uses the same object for all its turns."""

    __slots__ = ("came", "is_slow", "number")

    def __init__(self) -> None:
        self.came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Resolved when the turn comes. If the reader left before, the future is already done, and the turn does not
        count.
        """
        self.number = 0  # number of the current turn; 0 between turns
        self.is_slow = False


class Turns:
    def __init__(self) -> None:
        self._asking: deque[Turn] = deque()
        self._given: dict[Turn, float] = {}  # start times of the turns that count towards the limit; oldest first
        self._num_given = 0
        self._longest = LONGEST_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def num_held(self) -> int:
        return len(self._given)

    def ask(self, turn: Turn) -> None:
        self._asking.append(turn)
        self._give()

    def end(self, turn: Turn) -> None:
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


class OutputStream:
    """The deltas of one request, which `RequestState` puts and one reader takes.

    A reader's turn lasts until it requests the next delta or leaves.
    """

    def __init__(self, num_outputs: int, turns: Turns, unread: UnreadOutput) -> None:
        self.num_open = num_outputs
        self.num_unread = 0  # bytes of output that the client has not read yet
        self.when_cut: Callable[[RequestError], None] | None = None
        """A function that `cut` calls to stop the reader, which may be writing a delta."""
        self._unread = unread
        self._taken = 0  # bytes of the delta that the reader is writing to the client
        self._full: deque[OutputDelta] = deque()
        # The last delta of each output, which still grows. Full deltas are sent before these pending deltas.
        self._pending: dict[int, OutputDelta] = {}
        self._whole: deque[Iterator[OutputDelta | None]] = deque()  # complete outputs, sent after all other deltas
        self._error: RequestError | None = None
        self._turns = turns
        self._turn = Turn()
        self._is_awaited = False  # whether the reader waits for output
        self._loop = asyncio.get_running_loop()

    def put(self, delta: OutputDelta) -> None:
        """Add a delta without waiting. Deltas of one output are merged until the reader takes them."""
        self.count(delta.num_bytes)
        waiting = self._pending.get(delta.index)
        if waiting is not None and not waiting.is_full:
            waiting.merge(delta)
        else:
            self._begin(delta)
        self._notify()

    def put_token(self, index: int, token_id: int, text: str, num_output_tokens: int) -> None:
        """Add a token and its text: the fast path of `put` for a request with `is_plain`, which most tokens take."""
        self.count(output_bytes(1, len(text)))
        delta = self._pending.get(index)
        if delta is None or len(delta.token_ids) >= MAX_TOKENS or len(delta.text) >= MAX_CHARACTERS:
            delta = self._begin(OutputDelta(index))
        delta.token_ids.append(token_id)
        delta.text += text
        delta.num_output_tokens = num_output_tokens
        if self._is_awaited:
            self._notify()

    def put_prompt_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        at_once = max(1, MAX_LOGPROBS // len(entries[0].token_ids))
        for start in range(0, len(entries), at_once):
            self.put(OutputDelta(0, prompt_logprobs=list(entries[start : start + at_once])))

    def put_whole(self, deltas: Iterator[OutputDelta | None]) -> None:
        """Add a complete output. Its deltas are created, and their bytes counted, when the reader takes them."""
        self._whole.append(deltas)
        self._notify()

    def _begin(self, delta: OutputDelta) -> OutputDelta:
        if (full := self._pending.pop(delta.index, None)) is not None:
            self._full.append(full)
        self._pending[delta.index] = delta
        return delta

    def keep(self, delta: OutputDelta) -> None:
        """Count a delta that the reader stores as unread until the reader leaves."""
        self.count(delta.num_bytes)

    def count(self, num_bytes: int) -> None:
        """Add to the number of unread bytes; a negative `num_bytes` has been read."""
        self.num_unread += num_bytes
        self._unread.num_bytes += num_bytes

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def fail(self, error: RequestError) -> None:
        """End the stream with an error, after the pending deltas. The first error counts."""
        self._error = self._error or error
        self._notify()

    def cut(self, error: RequestError) -> None:
        self._drop()
        self.fail(error)
        if self.when_cut is not None:
            self.when_cut(error)

    def _notify(self) -> None:
        if self._is_awaited:
            self._is_awaited = False
            self._turns.ask(self._turn)

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> OutputDelta:
        while True:
            self._turns.end(self._turn)
            self.count(-self._taken)
            self._taken = 0
            if not self.num_open and not self._has_some:
                raise StopAsyncIteration
            self._turn.came = self._loop.create_future()
            self._is_awaited = True
            if self._has_some or self._error is not None:
                self._notify()
            await self._turn.came
            if not self._has_some:
                assert self._error is not None
                # raising the stored error would form a reference cycle (error, frame, stream) until Python's collector
                # runs
                raise RequestError(self._error.code, str(self._error))
            if (delta := self._take()) is not None:
                self.num_open -= delta.status is not None
                return delta
            await asyncio.sleep(0)

    @property
    def _has_some(self) -> bool:
        return bool(self._pending or self._full or self._whole)

    def _take(self) -> OutputDelta | None:
        if self._full or self._pending:
            first = self._full.popleft() if self._full else self._pending.pop(next(iter(self._pending)))
            self._taken = first.num_bytes
            return first
        delta = next(self._whole[0])
        if delta is not None and delta.status is not None:
            self._whole.popleft()
        return delta

    def leave(self) -> None:
        self._turns.end(self._turn)
        self._drop()

    def _drop(self) -> None:
        self._full.clear()
        self._pending.clear()
        self._whole.clear()
        self.count(-self.num_unread)
        self._taken = 0
