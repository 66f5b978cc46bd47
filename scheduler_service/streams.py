"""Output on its way to one client: merged while the client is slow, so a stream never holds more than its output."""

import asyncio
from dataclasses import dataclass, field

from pagewire_common.errors import RequestError
from scheduler_service.core import SequenceStatus
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.turns import Turn, Turns


@dataclass(slots=True)
class OutputDelta:
    """What one output gained. `status` is set, and `stop` may be, when it ended."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    status: SequenceStatus | None = None
    stop: str | int | None = None
    """The stop string or stop token that ended it, when the request named one."""
    num_output_tokens: int = 0

    def merge(self, later: "OutputDelta") -> None:
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.status = later.status
        self.stop = later.stop
        self.num_output_tokens = later.num_output_tokens


class OutputStream:
    """The deltas of one request. The engine puts, one reader iterates until every output has ended.

    Readers whose streams share `turns` are given theirs: one lasts from a delta until the next is asked for, or until
    the reader leaves.
    """

    def __init__(self, num_outputs: int, turns: Turns) -> None:
        self.num_open = num_outputs
        self._pending: dict[int, OutputDelta] = {}
        self._error: RequestError | None = None
        self._turns = turns
        self._turn = Turn()
        self._is_awaited = False  # by the reader, which asks for its turn when there is something to read
        self._loop = asyncio.get_running_loop()

    def put(self, delta: OutputDelta) -> None:
        """Never waits: what the reader has not taken yet is merged."""
        if waiting := self._pending.get(delta.index):
            waiting.merge(delta)
        else:
            self._pending[delta.index] = delta
        self._notify()

    def put_token(self, index: int, token_id: int, text: str, num_output_tokens: int) -> None:
        """The same for a token and its text, which is what most deltas are, and nearly every one of them merged."""
        delta = self._pending.get(index)
        if delta is None:
            delta = self._pending[index] = OutputDelta(index)
        delta.token_ids.append(token_id)
        delta.text += text
        delta.num_output_tokens = num_output_tokens
        if self._is_awaited:
            self._notify()

    def fail(self, error: RequestError) -> None:
        """End the stream with an error, after what is pending."""
        self._error = error
        self._notify()

    def _notify(self) -> None:
        if self._is_awaited:
            self._is_awaited = False
            self._turns.ask(self._turn)

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> OutputDelta:
        """The next delta; raises the RequestError that ended the stream."""
        self._turns.end(self._turn)
        if not self._pending and not self.num_open:
            raise StopAsyncIteration
        self._turn.came = self._loop.create_future()
        self._is_awaited = True
        if self._pending or self._error is not None:
            self._notify()
        await self._turn.came
        if not self._pending:
            assert self._error is not None
            raise self._error
        delta = self._pending.pop(next(iter(self._pending)))
        self.num_open -= delta.status is not None
        return delta

    def leave(self) -> None:
        """The reader reads no more."""
        self._turns.end(self._turn)
