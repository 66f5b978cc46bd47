"""Output streams to clients. While a client reads slowly, the deltas of its stream are merged and need little memory.

When a merged delta reaches a size limit, the next delta begins. Each delta is sent as one gRPC message. The size limits
of deltas keep messages below the default limit of every client, and make encoding quick. A token and its text are
always in the same delta, because a client may resume a broken stream after any message.
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
"""Number of log-probabilities at which a delta is full. A merged delta may have up to twice as many log-probabilities.
Encoding a log-probability takes 2.6 µs. The limits of tokens, characters and log-probabilities keep messages below 0.3
MB.
"""
MAX_VECTOR_BYTES = 1 << 20
"""Bytes of vectors at which a delta is full."""


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
    """The request's stop string or stop token that ended the output; None if neither did."""
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
        """Bytes of memory of the delta.

        Prompt log-probabilities and vectors are not included: they are counted with the request.
        """
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
    """The deltas of one request.

    `RequestState` puts deltas on the stream; one reader iterates until every output has ended.

    Streams with the same `turns` take turns. The turn of a stream's reader lasts from one delta until the reader
    requests the next delta or leaves. With `until_ended`, the reader receives the deltas of an output only after this
    output has ended. A reader that stores a delta, instead of sending it, reports the delta with `keep`.
    """

    def __init__(self, num_outputs: int, turns: Turns, unread: UnreadOutput, *, until_ended: bool = False) -> None:
        self.num_open = num_outputs
        self.num_unread = 0  # bytes of output that the client has not read yet
        self.when_cut: Callable[[RequestError], None] | None = None
        """A function that `cut` calls, because the reader may be writing a delta at this moment and must be stopped."""
        self._until_ended = until_ended
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
        """Add a delta to the stream without waiting. Deltas of one output are merged until the reader takes them."""
        self.count(delta.num_bytes)
        waiting = self._pending.get(delta.index)
        if waiting is not None and not waiting.is_full:
            waiting.merge(delta)
        else:
            self._begin(delta)
        if delta.status is not None or not self._until_ended:
            self._notify()

    def put_token(self, index: int, token_id: int, text: str, num_output_tokens: int) -> None:
        """Add a token and its text, for a request with `is_plain`.

        `put_token` is a fast path of `put`: deltas of requests with `is_plain` have no log-probabilities or vectors.
        Most tokens are added with `put_token`, and nearly all are merged into an existing delta.
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
        """Add the log-probabilities of one or more further positions of the prompt."""
        at_once = max(1, MAX_LOGPROBS // len(entries[0].token_ids))
        for start in range(0, len(entries), at_once):
            self.put(OutputDelta(0, prompt_logprobs=list(entries[start : start + at_once])))

    def put_whole(self, deltas: Iterator[OutputDelta | None]) -> None:
        """Add the deltas of a complete output.

        A delta of a complete output is created, and its bytes are counted, when the reader takes the delta.
        """
        self._whole.append(deltas)
        self._notify()

    def _begin(self, delta: OutputDelta) -> OutputDelta:
        if (full := self._pending.pop(delta.index, None)) is not None:
            self._full.append(full)
        self._pending[delta.index] = delta
        return delta

    def keep(self, delta: OutputDelta) -> None:
        """Record that the reader stores a delta instead of sending it.

        The delta counts as unread until the reader leaves.
        """
        self.count(delta.num_bytes)

    def count(self, num_bytes: int) -> None:
        """Add to the number of unread bytes. A negative `num_bytes` means bytes that the client has read."""
        self.num_unread += num_bytes
        self._unread.num_bytes += num_bytes

    def fail(self, error: RequestError) -> None:
        """End the stream with an error, after the pending deltas. If `fail` is called again, the first error counts."""
        self._error = self._error or error
        self._notify()

    def cut(self, error: RequestError) -> None:
        """Drop the pending deltas, and end the stream with an error."""
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
        """Wait for the next delta. Raises the RequestError that ended the stream."""
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
                # A new error is raised, because a raised error refers to this frame and, through the frame, to the
                # stream. If the stream also referred to the raised error, a reference cycle would stay in memory until
                # Python's collector runs.
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
        """End the reader's turn and drop unread deltas, because the reader stops reading."""
        self._turns.end(self._turn)
        self._drop()

    def _drop(self) -> None:
        self._full.clear()
        self._pending.clear()
        self._whole.clear()
        self.count(-self.num_unread)
        self._taken = 0
