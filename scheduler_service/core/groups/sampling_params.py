"""The sampling parameters that planning reads. `wire.sampling` adds those that only a worker's sampler needs."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from scheduler_service.core.groups.pooling_params import PoolingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptParams:
    """Rules for a transcript with timestamp tokens, 20 ms apart (Whisper; Radford et al., 2023).

    `suppressed` tokens are never chosen, `begin_suppressed` not as the first token. `first_timestamp` marks 0 s, and
    higher ids later times; 0 means no timestamps. The first token is a timestamp of at most `first_timestamp` +
    `max_initial`. The first `num_text_tokens` tokens of the vocabulary are text.
    """

    first_timestamp: int = 0
    max_initial: int = 0
    num_text_tokens: int = 0
    suppressed: SequenceOf[int] = ()
    begin_suppressed: SequenceOf[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop, with every default filled in.

    `eos_token_ids` are not reported as stop tokens, and are empty with ignore_eos. `logprobs`: None for none, 0 for the
    chosen token's alone. `beam_width`: 0 without a beam search, which returns the best `n` outputs. `form`: the output
    form (such as a grammar), in the worker's format.
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
        """Log-probabilities that the worker reports; at least `beam_width` of a beam's must not end the output."""
        return self.beam_width + len(self.end_token_ids) if self.beam_width else self.logprobs

    @property
    def needs_all_states(self) -> bool:
        """Whether the whole prompt must be computed, even if a part is cached."""
        return self.prompt_logprobs is not None or (self.pooling is not None and self.pooling.needs_all_states)

    @property
    def reports(self) -> bool:
        """Whether answers contain more than tokens."""
        return self.num_logprobs is not None or self.prompt_logprobs is not None or self.pooling is not None

    def allows_some(self, token_ids: SequenceOf[int], num_output_tokens: int) -> bool:
        """Whether any token may follow `token_ids`, of which the last `num_output_tokens` are output. Every vocabulary
        is larger than the set of banned tokens."""
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
        """The parameters of one output. Only the first output has prompt log-probabilities."""
        return self if index == 0 or self.prompt_logprobs is None else replace(self, prompt_logprobs=None)
