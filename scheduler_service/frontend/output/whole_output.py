"""Complete outputs of best_of and beam search, which are sent to the client after all outputs have ended.

A resumed stream's outputs are generated again, and decoded from the start, because later text depends on earlier
tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc

from pagewire_common.calls.errors import RequestError
from scheduler_service.core import SequenceStatus
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.frontend.output.streams import MAX_TOKENS, OutputDelta


@dataclass(slots=True)
class WholeOutput:
    """A complete output. `texts`: the text of each token, possibly from a generator. `logprobs` may be empty."""

    token_ids: list[int] = field(default_factory=list)
    texts: Iterable[str] = ()
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.FINISHED_ABORTED
    stop: str | int | None = None

    def deltas(self, index: int, begun: Sequence[int]) -> Iterator[OutputDelta | None]:
        """The deltas of the output without the tokens `begun`, which the client has. A None lets other tasks run.

        Raises FAILED_PRECONDITION if the output does not start with `begun`.
        """
        # An aborted or failed output may be shorter than `begun`.
        has_ended = self.status in (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH_CAPPED)
        if has_ended and self.token_ids[: len(begun)] != list(begun):
            raise RequestError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"resume has {len(begun)} tokens of output {index}, but this server's search found another output; "
                "begin anew, without resume",
            )
        delta = OutputDelta(index)
        for position, (token_id, text) in enumerate(zip(self.token_ids, self.texts, strict=True)):
            if position < len(begun):
                if position % MAX_TOKENS == MAX_TOKENS - 1:
                    yield None
                continue
            if delta.is_full:
                yield delta
                delta = OutputDelta(index)
            delta.token_ids.append(token_id)
            delta.text += text
            if self.logprobs:
                delta.logprobs.append(self.logprobs[position])
        delta.status, delta.stop = self.status, self.stop
        delta.num_output_tokens = max(len(begun), len(self.token_ids))
        yield delta


class RankedOutput:
    """An output of a best_of request, stored until all outputs are ranked."""

    def __init__(self) -> None:
        self.whole = WholeOutput()
        self.logprob = 0.0  # the sum of the tokens' log-probabilities
        self._texts: list[str] = []
        self.whole.texts = self._texts

    def add(self, delta: OutputDelta) -> None:
        """Add a token with its text, or the end of the output."""
        if delta.token_ids:
            self.whole.token_ids += delta.token_ids
            self._texts.append(delta.text)
        elif self._texts:
            self._texts[-1] += delta.text
        self.whole.logprobs += delta.logprobs
        if delta.status is not None:
            self.whole.status, self.whole.stop = delta.status, delta.stop

    def place(self) -> tuple[bool, float]:
        """Sort key: by falling mean log-probability, failed outputs last."""
        return self.whole.status.has_failed, -self.logprob / max(1, len(self.whole.token_ids))
