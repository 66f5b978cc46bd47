"""Parses the outputs of a chat as assistants' messages, delta by delta."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.chat.events import Event, Reasoning
from scheduler_service.frontend.chat.parser import ChatParser
from scheduler_service.frontend.chat.syntax import ChatSyntax
from scheduler_service.frontend.chat.tools import Tool
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.frontend.output.streams import OutputDelta
from scheduler_service.frontend.servicer import encode_delta


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """More of one output. `message`: the delta over gRPC, whose text the `events` contain parsed.

    `num_reasoning_tokens`: those of the delta's tokens that are reasoning.
    """

    message: pb.GenerateResponse
    events: list[Event]
    prompt_token_ids: Sequence[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int


class ReasoningCount:
    """Counts an output's tokens up to the mark that closes its reasoning, however the output is cut into deltas.

    `close_id`: the token of the mark. If it is None, a delta with an end of reasoning counts as its end.
    """

    def __init__(self, close_id: int | None) -> None:
        self._close_id = close_id
        self._num_before = 0  # tokens before the first event, which tells whether they are reasoning
        self._is_open: bool | None = None

    def count(self, token_ids: Sequence[int], events: Sequence[Event]) -> int:
        """The number of reasoning tokens that a delta adds."""
        if self._close_id is None:
            self._is_open = isinstance(events[-1], Reasoning) if events else self._is_open
            return len(token_ids) if self._is_open else 0
        num_before = 0
        if self._is_open is None:
            if not events:
                self._num_before += len(token_ids)
                return 0
            self._is_open, num_before = isinstance(events[0], Reasoning), self._num_before
        if not self._is_open:
            return 0
        if self._close_id not in token_ids:
            return num_before + len(token_ids)
        self._is_open = False
        return num_before + token_ids.index(self._close_id) + 1


class ChatAnswers:
    """The messages of one chat. `tools`: the tools that the model may call. `special_tokens`: texts to drop.

    `close_id`: as of `ReasoningCount`.
    """

    def __init__(
        self,
        state: RequestState,
        syntax: ChatSyntax,
        tools: Sequence[Tool],
        special_tokens: Collection[str],
        close_id: int | None,
    ) -> None:
        self._state, self._syntax, self._tools, self._special = state, syntax, tools, special_tokens
        self._parsers: dict[int, ChatParser] = {}
        self._counts: defaultdict[int, ReasoningCount] = defaultdict(lambda: ReasoningCount(close_id))

    def encode(self, delta: OutputDelta) -> tuple[ChatDelta]:
        request = self._state.request
        events = self._events(delta.index, delta.text, is_over=delta.status is not None)
        found = ChatDelta(
            encode_delta(self._state, delta),
            events,
            request.prompt_token_ids,
            request.num_prompt_tokens,
            self._state.num_cached_tokens,
            self._counts[delta.index].count(delta.token_ids, events),
        )
        return (found,)

    def _events(self, index: int, text: str, *, is_over: bool) -> list[Event]:
        if (parser := self._parsers.get(index)) is None:
            parser = ChatParser(self._syntax, self._state.request.prompt_end, self._tools, self._special)
            self._parsers[index] = parser
        events = parser.feed(text)
        return events + parser.finish() if is_over else events
