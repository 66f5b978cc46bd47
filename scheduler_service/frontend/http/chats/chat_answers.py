"""Parses the outputs of a chat as assistants' messages, delta by delta."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.chat.events import Event
from scheduler_service.frontend.chat.parser import ChatParser
from scheduler_service.frontend.chat.syntax import ChatSyntax
from scheduler_service.frontend.chat.tools import Tool
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.frontend.output.streams import OutputDelta
from scheduler_service.frontend.servicer import encode_delta


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """More of one output. `message`: the delta over gRPC, whose text the `events` contain parsed."""

    message: pb.GenerateResponse
    events: list[Event]
    prompt_token_ids: Sequence[int]
    num_prompt_tokens: int
    num_cached_tokens: int


class ChatAnswers:
    """The messages of one chat. `tools`: the tools that the model may call. `special_tokens`: texts to drop."""

    def __init__(
        self, state: RequestState, syntax: ChatSyntax, tools: Sequence[Tool], special_tokens: Collection[str]
    ) -> None:
        self._state, self._syntax, self._tools, self._special = state, syntax, tools, special_tokens
        self._parsers: dict[int, ChatParser] = {}

    def encode(self, delta: OutputDelta) -> tuple[ChatDelta]:
        request = self._state.request
        is_over = delta.status is not None
        found = ChatDelta(
            encode_delta(self._state, delta),
            self._events(delta.index, delta.text, is_over=is_over),
            request.prompt_token_ids,
            request.num_prompt_tokens,
            self._state.num_cached_tokens,
        )
        return (found,)

    def _events(self, index: int, text: str, *, is_over: bool) -> list[Event]:
        if (parser := self._parsers.get(index)) is None:
            parser = ChatParser(self._syntax, self._state.request.prompt_end, self._tools, self._special)
            self._parsers[index] = parser
        events = parser.feed(text)
        return events + parser.finish() if is_over else events
