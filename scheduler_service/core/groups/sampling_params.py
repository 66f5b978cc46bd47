"""The sampling parameters that planning reads: number of outputs, stop conditions, and log-probabilities.

Planning does not read the parameters that only a worker's sampler needs; `wire.sampling` adds them.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from scheduler_service.core.groups.pooling_params import PoolingParams
from scheduler_service.core.groups.transcript_params import TranscriptParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop, with every default filled in.

    `eos_token_ids`: end tokens of the model, which are not reported as stop tokens; empty with ignore_eos.
    `stop_token_ids`: tokens that the request named to end the output. `logprobs` is None for no log-probabilities, and
    0 for only the chosen token's log-probability. `beam_width` is 0 without a beam search. A beam search samples
    nothing, and returns the best `n` of its `beam_width` outputs. `form`: the output form (such as a grammar) that an
    output must follow, in the worker's format. `pooling`: parameters of a request for vectors, which samples nothing.
    `transcript`: rules for the order of tokens in a transcript, and tokens that are never chosen.
    """

    max_tokens: int
    n: int = 1
    min_tokens: int = 0
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: SequenceOf[int] = ()
    bad_words: tuple[SequenceOf[int], ...] = ()
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False
    form: str = ""
    pooling: PoolingParams | None = None
    transcript: TranscriptParams | None = None

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self.eos_token_ids | self.stop_token_ids if self.stop_token_ids else self.eos_token_ids

    @property
    def num_logprobs(self) -> int | None:
        """Number of log-probabilities that the worker reports for a token. In a beam search, at least `beam_width` of
        the reported tokens must not end the output."""
        return self.beam_width + len(self.end_token_ids) if self.beam_width else self.logprobs

    @property
    def needs_all_states(self) -> bool:
        """Whether the whole prompt must be computed, even if the cache contains a part of it."""
        return self.prompt_logprobs is not None or (self.pooling is not None and self.pooling.needs_all_states)

    @property
    def reports(self) -> bool:
        """Whether answers contain more than tokens for this request."""
        return self.num_logprobs is not None or self.prompt_logprobs is not None or self.pooling is not None

    def allows_some(self, token_ids: SequenceOf[int], num_output_tokens: int) -> bool:
        """Whether any token may follow `token_ids`, of which the last `num_output_tokens` are output.

        Without `allowed_token_ids` the result is always True, because every vocabulary is larger than the set of banned
        tokens.
        """
        if not self.allowed_token_ids:
            return True
        banned = set(self.end_token_ids) if num_output_tokens < self.min_tokens else set()
        for *before, last in filter(None, self.bad_words):
            if not before or list(token_ids[-len(before) :]) == before:
                banned.add(last)
        if self.transcript is not None:
            banned.update(self.transcript.suppressed, () if num_output_tokens else self.transcript.begin_suppressed)
        return any(token_id not in banned for token_id in self.allowed_token_ids)

    def for_index(self, index: int) -> "SamplingParams":
        """The parameters of one output. Prompt log-probabilities are computed only with the first output."""
        return self if index == 0 or self.prompt_logprobs is None else replace(self, prompt_logprobs=None)
