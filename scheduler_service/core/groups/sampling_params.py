"""The sampling parameters that planning reads: numbers of outputs, ends, and log-probabilities.

The numbers for a worker's sampler pass through unread: `wire.sampling` adds them.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from scheduler_service.core.groups.pooling_params import PoolingParams
from scheduler_service.core.groups.transcript_params import TranscriptParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop, with every default filled in.

    `eos_token_ids` are the tokens that end the output silently (empty with ignore_eos), `stop_token_ids` those that
    the request named. `logprobs` None asks for none, 0 for the chosen token's alone. `beam_width` 0 is no beam search;
    with it nothing is sampled, and `n` of the `beam_width` outputs that the search ends with are wanted. `form` is the
    grammar that an output must follow, as the worker reads it. With `pooling` nothing is sampled, and vectors are
    wanted. `transcript` says which tokens may follow each other where the output is one, and which are never chosen.
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
        """Log-probabilities that the worker reports. A beam search needs as many continuations without an end as
        beams."""
        return self.beam_width + len(self.end_token_ids) if self.beam_width else self.logprobs

    @property
    def needs_all_states(self) -> bool:
        """Whether the whole prompt has to be computed, whatever of it the cache has."""
        return self.prompt_logprobs is not None or (self.pooling is not None and self.pooling.needs_all_states)

    @property
    def reports(self) -> bool:
        """Whether answers have more for it than tokens."""
        return self.num_logprobs is not None or self.prompt_logprobs is not None or self.pooling is not None

    def allows_some(self, token_ids: SequenceOf[int], num_output_tokens: int) -> bool:
        """Whether any token may follow these, of which the last so many are output.

        Without `allowed_token_ids` there always is one: no vocabulary is as small as what else may be banned.
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
        """The parameters of one output: prompt log-probabilities are computed once, with the first."""
        return self if index == 0 or self.prompt_logprobs is None else replace(self, prompt_logprobs=None)
