"""The worker's types for the scheduler's steps and for the answers to steps, without protobuf.

The file `codec.py` converts protobuf messages to the types in this file. `codec.py` also checks all values that can be
checked without knowing the live sequences. The file `session.py` checks the remaining values.
"""

import enum
from array import array
from dataclasses import dataclass, field
from functools import cached_property

from pagewire_common.sampling import LOGIT_EDITS, SamplerParams

TOKENS = "q"
"""The type code of arrays of token ids and of block numbers: 64-bit integers, which torch reads without conversion."""


@dataclass(frozen=True)
class Limits:
    """The limits of a worker's steps, which follow from its model, memory and settings."""

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
    """Maximum number of different LoRA adapters in one step."""
    max_cpu_loras: int = 0
    """Maximum number of LoRA adapters that the worker stores in host memory."""
    embedding_size: int = 0
    """Length of the vectors into which the model's hidden states are pooled, or 0 if the worker cannot pool."""
    num_labels: int = 0
    """Number of labels of the model's classifier, or 0 without a classifier."""
    max_encoder_len: int = 0
    """Maximum tokens of an encoder input of an encoder-decoder, or 0 for other models."""
    max_num_encoder_tokens: int = 0
    """Maximum tokens of all encoder inputs in one step."""
    feature_bytes: int = 0
    """Bytes of the audio features of an encoder input, or 0 if the encoder reads token ids."""
    aligns: bool = False
    """Whether the worker can compute the times at which a transcript's tokens are spoken."""

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
    """Tokens of the model's sliding window, or 0 without a window. Blocks behind the window are never read again."""
    swap_bytes_per_second: int
    prefill_tokens_per_second: int
    block_bytes: int
    lora_copy_seconds: float = 0.0
    """Measured seconds to copy the largest possible LoRA adapter to the device."""
    pooling_type: "PoolingType | None" = None
    """The pooling type with which the model was trained, or None for a classifier."""
    normalizes: bool = False
    """Whether the model was trained with vectors of length 1."""


class PoolingType(enum.Enum):
    """How the hidden states of a text are pooled into one vector, or into one vector for each token."""

    CLS = enum.auto()
    MEAN = enum.auto()
    LAST = enum.auto()
    ALL = enum.auto()
    SCORE = enum.auto()
    """The text's scores, which the model's classifier computes."""
    ALIGNMENT = enum.auto()
    """When each of the newest transcript tokens is spoken. A time is counted in encoder tokens from the audio's start.
    """


@dataclass(frozen=True)
class PoolingParams:
    """How to pool a sequence's hidden states. The protobuf message PoolingParams documents the fields."""

    type: PoolingType
    dimensions: int
    normalize: bool = False
    half: bool = False
    num_first_tokens: int = 0
    num_sound_tokens: int = 0


@dataclass(frozen=True)
class TranscriptParams:
    """The rules for tokens of a transcript of speech. The protobuf message TranscriptParams documents the fields."""

    first_timestamp: int = 0
    max_initial: int = 0
    num_text_tokens: int = 0
    suppressed: tuple[int, ...] = ()
    begin_suppressed: tuple[int, ...] = ()


@dataclass(frozen=True)
class SamplingParams(SamplerParams):
    """How to sample a sequence's tokens. The protobuf messages GroupSampling and NewSequence document the fields."""

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
    """The tenant, as a digest of its name. Bans and time limits of an output form apply to each tenant separately."""
    pooling: PoolingParams | None = None
    """How to pool the sequence's hidden states, or None if the sequence samples tokens."""
    transcript: TranscriptParams | None = None
    is_beam: bool = False

    @cached_property
    def edits_logits(self) -> bool:
        """Whether the parameters edit logits before sampling, and so may change which token is the likeliest.

        Temperature, top-k and top-p do not count as edits.
        """
        return bool(
            any(getattr(self, name) != nothing for name, nothing in LOGIT_EDITS.items())
            or (self.min_tokens and self.eos_token_ids) or self.logit_bias
            or self.allowed_token_ids or self.bad_words or self.form or self.transcript
        )  # fmt: skip

    @cached_property
    def reports(self) -> bool:
        """Whether the request asks for log-probabilities or for pooled vectors."""
        return self.pooling is not None or self.logprobs is not None or self.prompt_logprobs is not None

    @cached_property
    def penalizes(self) -> bool:
        """Whether a penalty changes the logits of tokens that the sequence already contains."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class NewSequence:
    """A sequence that a step adds to the session."""

    sequence_id: int
    token_ids: "array[int]"
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: "array[int]"
    sampling: SamplingParams
    adapter: str = ""
    """The fingerprint of the sequence's LoRA adapter, or an empty string for the base model."""
    is_encoder: bool = False
    """Whether the sequence is an encoder input. If the encoder input is audio, its `token_ids` are placeholders."""
    features: bytes = b""
    """The audio features of an encoder input: float32, little-endian, all frames of the first mel bin, then of the
    second bin, and so on.
    """
    encoder_id: int = 0
    """The id of the sequence that is this sequence's encoder input, or 0 if the sequence has none."""


@dataclass(frozen=True)
class BlockTableUpdate:
    """Replaces the entries of a sequence's block table from index `start` on."""

    sequence_id: int
    start: int
    block_ids: "array[int]"


@dataclass(frozen=True)
class Fork:
    """A new sequence with the parameters and the first `num_tokens` tokens of its parent, followed by the tokens
    `token_ids`.
    """

    parent_id: int
    child_id: int
    num_tokens: int
    num_computed_tokens: int
    block_ids: "array[int]"
    index: int
    token_ids: "array[int]" = field(default_factory=lambda: array(TOKENS))


@dataclass(frozen=True)
class BlockMapping:
    """Copies of blocks: block `sources[i]` is copied to block `destinations[i]`. No destination occurs twice."""

    sources: tuple[int, ...] = ()
    destinations: tuple[int, ...] = ()


@dataclass(frozen=True)
class SchedulerOutput:
    """The work of one step. `sequence_ids`, `num_scheduled_tokens` and `samples` are columns with one entry for each
    chunk.
    """

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
    """A column with the number of scheduled tokens that are reserved for drafts. The column is empty if no sequence may
    have drafts in this step.
    """


@dataclass(frozen=True)
class SampleLogprobs:
    """Log-probabilities at positions of one sequence, as columns. Each position has `width` entries: first the token at
    the position, then the likeliest tokens.
    """

    sequence_id: int
    width: int
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    """The rank of the token at each position, in the order of log-probabilities. The likeliest token has rank 1."""


@dataclass(frozen=True)
class SequenceVectors:
    """The vectors into which one sequence was pooled."""

    sequence_id: int
    data: bytes
    """The numbers of all vectors, one vector after the other: float32 or float16, little-endian."""


@dataclass(frozen=True)
class StepTiming:
    """Durations of a step's parts in microseconds."""

    move_us: int
    forward_us: int
    sample_us: int
    guess_us: int = 0

    @property
    def seconds(self) -> float:
        """The step's duration in seconds: moves of blocks, forward pass and sampling."""
        return (self.move_us + self.forward_us + self.sample_us) / 1e6


@dataclass(frozen=True)
class ModelOutput:
    """The results of one step."""

    token_ids: list[int]
    """The tokens that the sampling sequences gained, in the order of the step's chunks. A sequence for which sampling
    failed has token 0.
    """
    timing: StepTiming
    logprobs: list[SampleLogprobs] = field(default_factory=list)
    prompt_logprobs: list[SampleLogprobs] = field(default_factory=list)
    failed_sequence_ids: list[int] = field(default_factory=list)
    """Ids of sequences for which no token could be sampled, or whose vectors or prompt log-probabilities were not
    finite.
    """
    num_tokens: list[int] = field(default_factory=list)
    """The number of tokens that each sampling sequence gained. The list is empty if each of these sequences gained one
    token.
    """
    num_draft_tokens: list[int] = field(default_factory=list)
    """The number of verified drafts of each sampling sequence. The list is empty if the step verified no drafts."""
    num_draft_tokens_wanted: list[int] = field(default_factory=list)
    """The number of drafts for which the scheduler should reserve tokens of later steps, for each sampling sequence.
    The list is empty if no number has changed.
    """
    vectors: list[SequenceVectors] = field(default_factory=list)
    barred_sequence_ids: list[int] = field(default_factory=list)
    """Ids of the failed sequences whose logits are finite, but whose parameters or output form allow no token."""
