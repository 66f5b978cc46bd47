"""The types of a session: the scheduler's steps and the worker's answers, without protobuf.

The file `codec.py` converts protobuf messages to these types. `codec.py` also checks the values that can be checked
without a session's state. The file `session.py` checks the remaining values.
"""

import enum
from array import array
from dataclasses import dataclass, field
from functools import cached_property

from pagewire_common.sampling import LOGIT_EDITS, SamplerParams

TOKENS = "q"
"""The type code of arrays of token ids and block numbers: 64-bit integers, which torch reads without conversion."""


@dataclass(frozen=True)
class Limits:
    """The limits of a step."""

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    vocabulary_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    num_speculative_tokens: int = 0
    """Maximum number of drafts of one sequence in one step."""
    max_loras: int = 0
    """Maximum number of adapters in one step."""
    max_cpu_loras: int = 0
    """Maximum number of adapters in host memory."""
    embedding_size: int = 0
    """Length of the vectors that are pooled from hidden states, or 0 if the model does not pool."""
    num_labels: int = 0
    """Number of the classifier's labels, or 0 without a classifier."""
    max_encoder_len: int = 0
    """Maximum tokens of an encoder input of an encoder-decoder, or 0 for other models."""
    max_num_encoder_tokens: int = 0
    """Maximum tokens of all encoder inputs in one step."""
    feature_bytes: int = 0
    """Bytes of an audio input's features, or 0 if the encoder reads token ids."""
    aligns: bool = False
    """Whether the worker reports the times of a transcript's tokens."""

    @property
    def is_encoder(self) -> bool:
        """Whether the model is an encoder, which computes whole texts and stores no keys and values."""
        return not self.num_device_blocks


@dataclass(frozen=True)
class WorkerInfo:
    """The worker's properties that a scheduler needs before it opens a session. `Limits` has further properties."""

    model_id: str
    model_fingerprint: str
    dtype: str
    device: str
    features: tuple[str, ...]
    sliding_window: int
    """Tokens of the sliding window, or 0 without a window. Blocks behind the window are never read again."""
    swap_bytes_per_second: int
    prefill_tokens_per_second: int
    block_bytes: int
    lora_copy_seconds: float = 0.0
    """Seconds to copy an adapter of the largest rank to the device."""
    pooling_type: "PoolingType | None" = None
    """The pooling type that the model was trained with, or None if the model does not pool."""
    normalizes: bool = False
    """Whether the model was trained for vectors of length 1."""


class PoolingType(enum.Enum):
    """The rule that pools the hidden states of a text. The result is one vector, or one vector for each token."""

    CLS = enum.auto()
    MEAN = enum.auto()
    LAST = enum.auto()
    ALL = enum.auto()
    SCORE = enum.auto()
    """Scores of the text by the network's classifier."""
    ALIGNMENT = enum.auto()
    """Times of the last tokens of a transcript."""


@dataclass(frozen=True)
class PoolingParams:
    """How to pool a sequence's hidden states. The proto message documents the fields."""

    type: PoolingType
    dimensions: int
    normalize: bool = False
    half: bool = False
    num_first_tokens: int = 0
    num_sound_tokens: int = 0


@dataclass(frozen=True)
class TranscriptParams:
    """The rules of a transcript's tokens. The proto message documents the fields."""

    first_timestamp: int = 0
    max_initial: int = 0
    num_text_tokens: int = 0
    suppressed: tuple[int, ...] = ()
    begin_suppressed: tuple[int, ...] = ()


@dataclass(frozen=True)
class SamplingParams(SamplerParams):
    """How to choose a sequence's tokens. The proto messages GroupSampling and NewSequence document the fields."""

    seed: int = 0
    index: int = 0
    min_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: "array[int]" = field(default_factory=lambda: array(TOKENS))
    bad_words: tuple[tuple[int, ...], ...] = ()
    form: str = ""
    form_owner: bytes = b""
    """The owner of the form. Bans and time limits of the form apply only to this owner."""
    pooling: PoolingParams | None = None
    """How to pool the sequence, or None if the sequence samples tokens."""
    transcript: TranscriptParams | None = None
    is_beam: bool = False

    @cached_property
    def edits_logits(self) -> bool:
        """Whether the parameters edit logits: the edits can change which token is the likeliest.

        Temperature, top-k and top-p do not count as edits.
        """
        return bool(
            any(getattr(self, name) != nothing for name, nothing in LOGIT_EDITS.items())
            or (self.min_tokens and self.eos_token_ids) or self.logit_bias
            or self.allowed_token_ids or self.bad_words or self.form or self.transcript
        )  # fmt: skip

    @cached_property
    def reports(self) -> bool:
        """Whether log-probabilities or pooled vectors are reported."""
        return self.pooling is not None or self.logprobs is not None or self.prompt_logprobs is not None

    @cached_property
    def penalizes(self) -> bool:
        """Whether tokens that occurred before are penalised."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class NewSequence:
    """A sequence that is new to the worker, with all its data."""

    sequence_id: int
    token_ids: "array[int]"
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: "array[int]"
    sampling: SamplingParams
    adapter: str = ""
    """The adapter's fingerprint, or an empty string for the base model."""
    is_encoder: bool = False
    """Whether the sequence is an encoder input. The `token_ids` of an audio input are placeholders."""
    features: bytes = b""
    """The features of an audio input: float32, little-endian, all frames of a mel bin, then the next bin."""
    encoder_id: int = 0
    """Id of the sequence that is this sequence's encoder input, or 0 without an encoder input."""


@dataclass(frozen=True)
class BlockTableUpdate:
    """Replaces a block table's entries from `start` on."""

    sequence_id: int
    start: int
    block_ids: "array[int]"


@dataclass(frozen=True)
class Fork:
    """A new sequence that copies its parent's parameters and first tokens, and continues with its own tokens."""

    parent_id: int
    child_id: int
    num_tokens: int
    num_computed_tokens: int
    block_ids: "array[int]"
    index: int
    token_ids: "array[int]" = field(default_factory=lambda: array(TOKENS))


@dataclass(frozen=True)
class BlockMapping:
    """Block copies: block number sources[i] is copied to block number destinations[i]. No destination appears twice."""

    sources: tuple[int, ...] = ()
    destinations: tuple[int, ...] = ()


@dataclass(frozen=True)
class SchedulerOutput:
    """One step's work. `sequence_ids`, `num_scheduled_tokens` and `samples` are columns of equal length."""

    epoch: int
    step_id: int
    new_sequences: tuple[NewSequence, ...] = ()
    sequence_ids: tuple[int, ...] = ()
    num_scheduled_tokens: tuple[int, ...] = ()
    samples: tuple[bool, ...] = ()
    block_table_updates: tuple[BlockTableUpdate, ...] = ()
    forks: tuple[Fork, ...] = ()
    blocks_to_swap_out: BlockMapping = BlockMapping()
    blocks_to_swap_in: BlockMapping = BlockMapping()
    blocks_to_copy: BlockMapping = BlockMapping()
    finished: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    num_draft_tokens: tuple[int, ...] = ()
    """The number of scheduled tokens that are reserved for drafts, for each sequence. Empty if no sequence has room for
    drafts.
    """


@dataclass(frozen=True)
class SampleLogprobs:
    """Log-probabilities as columns. Each position has `width` entries: the token at the position, then the likeliest
    tokens.
    """

    sequence_id: int
    width: int
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    """The rank of each position's first entry. Rank 1 is the likeliest token."""


@dataclass(frozen=True)
class SequenceVectors:
    """The pooled vectors of one sequence."""

    sequence_id: int
    data: bytes
    """Floats of 32 or 16 bits, little-endian, one vector after the other."""


@dataclass(frozen=True)
class StepTiming:
    """Durations of a step's parts in microseconds."""

    move_us: int
    forward_us: int
    sample_us: int
    guess_us: int = 0

    @property
    def seconds(self) -> float:
        """The sum of the times for block moves, forward pass and sampling, in seconds."""
        return (self.move_us + self.forward_us + self.sample_us) / 1e6


@dataclass(frozen=True)
class ModelOutput:
    """The results of one step."""

    token_ids: list[int]
    """The tokens of each sequence that samples, in the order of the step. A failed sequence has token 0."""
    timing: StepTiming
    logprobs: list[SampleLogprobs] = field(default_factory=list)
    prompt_logprobs: list[SampleLogprobs] = field(default_factory=list)
    failed_sequence_ids: list[int] = field(default_factory=list)
    """Sequences for which no token could be chosen, or whose prompt's log-probabilities were not finite."""
    num_tokens: list[int] = field(default_factory=list)
    """The number of tokens that each sampling sequence gained. Empty if each sequence gained one token."""
    num_draft_tokens: list[int] = field(default_factory=list)
    """The number of verified drafts of each sampling sequence. Empty if no drafts were verified."""
    num_draft_tokens_wanted: list[int] = field(default_factory=list)
    """The number of drafts for which later steps should have room, for each sampling sequence. Empty if no number has
    changed.
    """
    vectors: list[SequenceVectors] = field(default_factory=list)
    barred_sequence_ids: list[int] = field(default_factory=list)
    """Failed sequences with finite logits, whose parameters or form allow no token."""
