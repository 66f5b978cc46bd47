"""Arranges the deltas of a repeated stream so that one of them ends where a client's stream broke.

The server repeats the stream from its beginning, but the deltas of the repetition have other borders, and outputs come
in another order. First come all tokens before the delta of the client's last event, then this delta as it was, then
the rest. What follows from a delta depends on the tokens before the delta alone, so the delta gives the same events.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import grpc

from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.calls.generation import Answers
from scheduler_service.frontend.http.resuming.event_ids import Position
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.frontend.output.streams import OutputDelta


def not_the_same() -> RequestError:
    reason = "the stream cannot be resumed: the server generates other tokens than the client has received; begin anew"
    return RequestError(grpc.StatusCode.FAILED_PRECONDITION, reason)


class Replay:
    """`state`: the repeated request."""

    def __init__(self, state: RequestState, model: ServedModel, position: Position) -> None:
        self._stream, self._num_new = state.stream, position.num_new
        self._num_left = list(position.num_tokens)  # tokens of each output that are still to come before the delta
        self._texts = [state.request.text(model.tokenizer) for _ in position.num_tokens]
        self._delta = OutputDelta(position.output)  # as far as it has come
        self._held: list[OutputDelta] = []
        self._is_over = not any(self._num_left) and not position.num_new

    def arrange(self, delta: OutputDelta) -> Iterator[OutputDelta]:
        """Yield deltas that may come now. Raises RequestError if an output ends too early."""
        if self._is_over:
            yield delta
            return
        index, rest = delta.index, delta
        if num_left := self._num_left[index]:
            before, rest = self._cut(rest, num_left)
            self._num_left[index] -= len(before.token_ids)
            yield before
        if index == self._delta.index and not self._num_left[index] and (missing := self._num_missing):
            gained, rest = self._cut(rest, missing)
            self._delta.merge(gained)
        if delta.status is not None and (self._num_left[index] or (index == self._delta.index and self._num_missing)):
            raise not_the_same()
        if rest.token_ids or rest.status is not None:
            self._held.append(rest)
            self._stream.keep(rest)
        if not any(self._num_left) and not self._num_missing:
            self._is_over = True
            yield self._delta
            for held in self._held:
                self._stream.count(-held.num_bytes)
                yield held
            self._held.clear()

    @property
    def _num_missing(self) -> int:
        return self._num_new - len(self._delta.token_ids)

    def _cut(self, delta: OutputDelta, num_tokens: int) -> tuple[OutputDelta, OutputDelta]:
        """Divide a delta after `num_tokens` tokens, at 2 µs a token. The end of an output belongs to its last token."""
        text = self._texts[delta.index]
        num_characters = sum(len(text.step(token_id)[0]) for token_id in delta.token_ids[:num_tokens])
        if num_tokens >= len(delta.token_ids):
            return delta, OutputDelta(delta.index)
        num_rest = len(delta.token_ids) - num_tokens
        first = OutputDelta(
            delta.index,
            delta.text[:num_characters],
            delta.token_ids[:num_tokens],
            delta.logprobs[:num_tokens],
            delta.prompt_logprobs,
            num_output_tokens=delta.num_output_tokens - num_rest,
        )
        return first, replace(
            delta,
            text=delta.text[num_characters:],
            token_ids=delta.token_ids[num_tokens:],
            logprobs=delta.logprobs[num_tokens:],
            prompt_logprobs=[],
        )


class Replayed:
    """The answers of a repeated stream."""

    def __init__(self, answers: Answers, replay: Replay) -> None:
        self._answers, self._replay = answers, replay

    def encode(self, delta: OutputDelta) -> Iterable[Any]:
        for arranged in self._replay.arrange(delta):
            yield from self._answers.encode(arranged)
