"""Beam search: chooses the continuations of a group's beams, and the complete outputs.

The algorithm is that of transformers' `GenerationMixin._beam_search`. The likeliest continuations of all beams compete
by the sum of their log-probabilities. A complete output's score is this sum divided by length ** length_penalty. The
search ends if no beam can be better than the worst of `beam_width` complete outputs. With `early_stopping`, any
`beam_width` complete outputs end the search.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Generic, NamedTuple, Protocol, TypeVar

from scheduler_service.core.groups.sampling_params import SamplingParams


class Beam(Protocol):
    """A running sequence. `score` is the sum of its tokens' log-probabilities."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def max_num_tokens(self) -> int: ...

    @property
    def output_token_ids(self) -> SequenceOf[int]: ...

    @property
    def score(self) -> float: ...

    @property
    def candidates(self) -> list[tuple[int, float]] | None:
        """Likeliest next tokens with log-probabilities; None before the worker's answer."""


B = TypeVar("B", bound=Beam)


class Continuation(NamedTuple, Generic[B]):
    parent: B
    token_id: int
    score: float


class Hypothesis(NamedTuple):
    """A complete output and its penalized score. `is_stopped` is false if the maximum length ended the output."""

    token_ids: list[int]
    score: float
    is_stopped: bool
    stop_token_id: int | None


class BeamSearch:
    """One group's search. `hypotheses` are the complete outputs, the best first, at most `beam_width`."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self.hypotheses: list[Hypothesis] = []

    @property
    def width(self) -> int:
        return self._sampling.beam_width

    def advance(self, beams: SequenceOf[B]) -> list[Continuation[B]]:
        """The beams of the next step, the best first; empty if the search is over. Every beam needs its
        `candidates`."""
        sampling = self._sampling
        num_output_tokens = beams[0].num_output_tokens + 1
        may_end = num_output_tokens > sampling.min_tokens
        is_last = beams[0].num_tokens + 1 >= beams[0].max_num_tokens
        ranked = sorted(self._continuations(beams, may_end=may_end), key=lambda c: -c.score)
        running: list[Continuation[B]] = []
        for place, continuation in enumerate(ranked):
            if is_last or continuation.token_id in sampling.end_token_ids:
                if place < self.width:
                    self._complete(continuation, num_output_tokens)
            elif len(running) < self.width:
                running.append(continuation)
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.width :]
        return running if running and not self._is_over(running[0], num_output_tokens) else []

    def _continuations(self, beams: SequenceOf[B], *, may_end: bool) -> Iterator[Continuation[B]]:
        for beam in beams:
            assert beam.candidates is not None
            for token_id, logprob in beam.candidates:
                if may_end or token_id not in self._sampling.end_token_ids:
                    yield Continuation(beam, token_id, beam.score + logprob)

    def _complete(self, continuation: Continuation[B], num_output_tokens: int) -> None:
        parent, token_id, score = continuation
        self.hypotheses.append(
            Hypothesis(
                [*parent.output_token_ids, token_id],
                self._penalized(score, num_output_tokens),
                token_id in self._sampling.end_token_ids,
                token_id if token_id in self._sampling.stop_token_ids else None,
            )
        )

    def _is_over(self, best: Continuation[B], num_output_tokens: int) -> bool:
        if len(self.hypotheses) < self.width:
            return False
        # An estimate, as in transformers: a running beam can still become better.
        best_possible = self._penalized(best.score, num_output_tokens)
        return self._sampling.early_stopping or best_possible <= self.hypotheses[-1].score

    def _penalized(self, score: float, num_output_tokens: int) -> float:
        return float(score / num_output_tokens**self._sampling.length_penalty)
