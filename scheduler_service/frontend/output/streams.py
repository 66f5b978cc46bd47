"""Output on its way to one client: merged while the client is slow, so a stream never holds more than its output.

A merged delta grows up to a limit, and then the next one is begun. A delta becomes one message, which is smaller than
every client's default limit and takes little time to encode. A token and its text are in the same delta, because a
client whose stream broke may resume it behind any message.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pagewire_common.calls.errors import RequestError
from scheduler_service.core import SequenceStatus
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.frontend.output.request_memory import UnreadOutput, logprob_bytes, output_bytes
from scheduler_service.frontend.output.turns import Turn, Turns

MAX_TOKENS = 2048
MAX_CHARACTERS = 1 << 16
MAX_LOGPROBS = 1024
"""A delta of as much is full: of tokens, of characters, or of single log-probabilities, which take 2.6 µs each to
encode. Up to twice as many of the last may come together. That makes messages of at most 0.3 MB.
"""
MAX_VECTOR_BYTES = 1 << 20
"""A delta of as many bytes of vectors is full, too."""


@dataclass(slots=True)
class OutputDelta:
    """The unsent part of one output. `status` is set, and `stop` may be, when the output ended."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    status: SequenceStatus | None = None
    stop: str | int | None = None
    """The stop string or stop token that ended it, when the request named one."""
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
        """Bytes of memory, without the prompt's log-probabilities and vectors, which were counted with the request."""
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


class OutputStream:
    """The deltas of one request. The engine puts deltas, one reader iterates until every output has ended.

    Streams that share `turns` take turns: a turn lasts from one delta until the reader asks for the next, or leaves.
    With `until_ended` the reader is given an output's deltas when the output, or another one, has ended; it may keep
    deltas, and tells how much it keeps.
    """

    def __init__(self, num_outputs: int, turns: Turns, unread: UnreadOutput, *, until_ended: bool = False) -> None:
        self.num_open = num_outputs
        self.num_unread = 0  # bytes of output that the reader is not done with
        self.when_cut: Callable[[RequestError], None] | None = None
        """Called when the stream is cut: the reader may be in the middle of writing a delta then."""
        self._until_ended = until_ended
        self._unread = unread
        self._taken = 0  # bytes of these that the reader has in hand, as a delta
        self._full: deque[OutputDelta] = deque()
        self._pending: dict[int, OutputDelta] = {}  # of each index the last, which grows; they follow the full ones
        self._whole: deque[Iterator[OutputDelta | None]] = deque()  # after everything else
        self._error: RequestError | None = None
        self._turns = turns
        self._turn = Turn()
        self._is_awaited = False  # by the reader, which asks for its turn when there is something to read
        self._loop = asyncio.get_running_loop()

    def put(self, delta: OutputDelta) -> None:
        """Never waits: what the reader has not taken yet is merged."""
        self.count(delta.num_bytes)
        waiting = self._pending.get(delta.index)
        if waiting is not None and not waiting.is_full:
            waiting.merge(delta)
        else:
            self._begin(delta)
        if delta.status is not None or not self._until_ended:
            self._notify()

    def put_token(self, index: int, token_id: int, text: str, num_output_tokens: int) -> None:
        """As `put`, for a token and its text, of a request that `is_plain`: no delta of such a request is full of
        log-probabilities or vectors. Most deltas are of this kind, and nearly all of them are merged.
        """
        self.count(output_bytes(1, len(text)))
        delta = self._pending.get(index)
        if delta is None or len(delta.token_ids) >= MAX_TOKENS or len(delta.text) >= MAX_CHARACTERS:
            delta = self._begin(OutputDelta(index))
        delta.token_ids.append(token_id)
        delta.text += text
        delta.num_output_tokens = num_output_tokens
        if self._is_awaited and not self._until_ended:
            self._notify()

    def put_prompt_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        """Put the log-probabilities of the prompt's next positions, at least one."""
        at_once = max(1, MAX_LOGPROBS // len(entries[0].token_ids))
        for start in range(0, len(entries), at_once):
            self.put(OutputDelta(0, prompt_logprobs=list(entries[start : start + at_once])))

    def put_whole(self, deltas: Iterator[OutputDelta | None]) -> None:
        """All of an output's deltas; they are made when the reader takes them, and not counted before."""
        self._whole.append(deltas)
        self._notify()

    def _begin(self, delta: OutputDelta) -> OutputDelta:
        if (full := self._pending.pop(delta.index, None)) is not None:
            self._full.append(full)
        self._pending[delta.index] = delta
        return delta

    def keep(self, delta: OutputDelta) -> None:
        """The reader keeps a delta that it was given: it counts as unread until the reader leaves."""
        self.count(delta.num_bytes)

    def count(self, num_bytes: int) -> None:
        """Add to the unread output; a negative number is output that has been read."""
        self.num_unread += num_bytes
        self._unread.num_bytes += num_bytes

    def fail(self, error: RequestError) -> None:
        """End the stream with an error, after what is pending. The first error counts."""
        self._error = self._error or error
        self._notify()

    def cut(self, error: RequestError) -> None:
        """End the stream with an error instead of what is pending."""
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
        """The next delta; raises the RequestError that ended the stream."""
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
                # A new error, because a raised error refers to this frame, and so to the stream. If the stream referred
                # to the error as well, both would stay in memory until Python's collector runs.
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
        """The reader reads no more."""
        self._turns.end(self._turn)
        self._drop()

    def _drop(self) -> None:
        self._full.clear()
        self._pending.clear()
        self._whole.clear()
        self.count(-self.num_unread)
        self._taken = 0
