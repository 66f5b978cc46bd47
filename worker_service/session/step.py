"""The vocabulary of a session: what the scheduler says of a step and what the worker answers, free of protobuf.

`codec` makes these from messages and checks every value that can be checked without the session; `session` checks the
rest.
"""

import enum
from array import array
from dataclasses import dataclass, field
from functools import cached_property

from pagewire_common.sampling import LOGIT_EDITS, SamplerParams

TOKENS = "q"
"""The type code of arrays of token ids and block numbers: 64-bit, which torch reads without conversion."""


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
    """Drafts for one sequence in one step."""
    max_loras: int = 0
    """Adapters in one step."""
    max_cpu_loras: int = 0
    """Adapters in host memory."""
    embedding_size: int = 0
    """Numbers of a vector that is pooled from states; 0 if none is."""
    num_labels: int = 0
    """Numbers that a classifier makes of a text; 0 without one."""
    max_encoder_len: int = 0
    """Tokens of what an encoder reads of one request; 0 without an encoder beside the decoder."""
    max_num_encoder_tokens: int = 0
    """Of all that encoders read in one step."""
    feature_bytes: int = 0
    """Of a sound's features; 0 where the encoder reads token ids."""
    aligns: bool = False
    """Whether it finds out when each token of a transcript is said."""

    @property
    def is_encoder(self) -> bool:
        """Whether texts are computed whole and no keys and values are kept."""
        return not self.num_device_blocks


@dataclass(frozen=True)
class WorkerInfo:
    """What a scheduler must know before it opens a session, beside the limits."""

    model_id: str
    model_fingerprint: str
    dtype: str
    device: str
    features: tuple[str, ...]
    sliding_window: int
    """Blocks more than so many tokens behind are never read again; 0 if all are read."""
    swap_bytes_per_second: int
    prefill_tokens_per_second: int
    block_bytes: int
    lora_copy_seconds: float = 0.0
    """That it takes to copy an adapter of the largest rank to the device."""
    pooling_type: "PoolingType | None" = None
    """How it was trained to be pooled; None where it is not pooled at all."""
    normalizes: bool = False
    """Whether the vectors that it was trained for are 1 long."""


class PoolingType(enum.Enum):
    """How the states of a text become one vector, or one for each token."""

    CLS = enum.auto()
    MEAN = enum.auto()
    LAST = enum.auto()
    ALL = enum.auto()
    SCORE = enum.auto()
    """What the network's classifier makes of the text."""
    ALIGNMENT = enum.auto()
    """When each of the last tokens of a transcript is said."""


@dataclass(frozen=True)
class PoolingParams:
    """What to make of a sequence's states; the meaning of each field is the message's."""

    type: PoolingType
    dimensions: int
    normalize: bool = False
    half: bool = False
    num_first_tokens: int = 0
    num_sound_tokens: int = 0


@dataclass(frozen=True)
class TranscriptParams:
    """How tokens of a transcript follow each other; the meaning of each field is the message's."""

    first_timestamp: int = 0
    max_initial: int = 0
    num_text_tokens: int = 0
    suppressed: tuple[int, ...] = ()
    begin_suppressed: tuple[int, ...] = ()


@dataclass(frozen=True)
class SamplingParams(SamplerParams):
    """How to choose a sequence's tokens; the meaning of each field is GroupSampling's or NewSequence's."""

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
    """Whose form it is: how long it takes is remembered for this owner alone."""
    pooling: PoolingParams | None = None
    """With it nothing is sampled."""
    transcript: TranscriptParams | None = None
    is_beam: bool = False

    @cached_property
    def edits_logits(self) -> bool:
        """Whether anything but the temperature and its filters changes which token is likeliest."""
        return bool(
            any(getattr(self, name) != nothing for name, nothing in LOGIT_EDITS.items())
            or (self.min_tokens and self.eos_token_ids) or self.logit_bias
            or self.allowed_token_ids or self.bad_words or self.form or self.transcript
        )  # fmt: skip

    @cached_property
    def reports(self) -> bool:
        """Whether anything but tokens is reported, of a prompt or of what follows."""
        return self.pooling is not None or self.logprobs is not None or self.prompt_logprobs is not None

    @cached_property
    def penalizes(self) -> bool:
        """Whether earlier tokens count."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class NewSequence:
    """A sequence that is new to the worker, complete."""

    sequence_id: int
    token_ids: "array[int]"
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: "array[int]"
    sampling: SamplingParams
    adapter: str = ""
    """The fingerprint of its adapter; empty for the base model."""
    is_encoder: bool = False
    """Whether it is what an encoder reads. Of a sound its `token_ids` are placeholders."""
    features: bytes = b""
    """Of a sound: float32, little-endian, one mel bin's frames after the other's."""
    encoder_id: int = 0
    """The sequence that its encoder reads; 0 for none."""


@dataclass(frozen=True)
class BlockTableUpdate:
    """Replaces a block table's entries from `start` on."""

    sequence_id: int
    start: int
    block_ids: "array[int]"


@dataclass(frozen=True)
class Fork:
    """A new sequence that takes another's first tokens and its parameters, and goes on with tokens of its own."""

    parent_id: int
    child_id: int
    num_tokens: int
    num_computed_tokens: int
    block_ids: "array[int]"
    index: int
    token_ids: "array[int]" = field(default_factory=lambda: array(TOKENS))


@dataclass(frozen=True)
class BlockMapping:
    """Pairs of block numbers: read from sources[i], write to destinations[i]. No destination appears twice."""

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
    """A further column: how many of the tokens are room for drafts; empty if none is."""


@dataclass(frozen=True)
class SampleLogprobs:
    """Log-probabilities as columns, `width` entries a position: the token that stands there, then the likeliest."""

    sequence_id: int
    width: int
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    """The rank of each position's first entry, 1 for the likeliest."""


@dataclass(frozen=True)
class SequenceVectors:
    """What was pooled of one sequence."""

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
        """Of moves, forward pass and sampling."""
        return (self.move_us + self.forward_us + self.sample_us) / 1e6


@dataclass(frozen=True)
class ModelOutput:
    """What one step produced."""

    token_ids: list[int]
    """What each sequence that samples gained, in the order of the step; 0 for a sequence that failed."""
    timing: StepTiming
    logprobs: list[SampleLogprobs] = field(default_factory=list)
    prompt_logprobs: list[SampleLogprobs] = field(default_factory=list)
    failed_sequence_ids: list[int] = field(default_factory=list)
    """Sequences for which no token could be chosen, or whose prompt's log-probabilities were not finite."""
    num_tokens: list[int] = field(default_factory=list)
    """How many tokens each sequence gained that sampled, if not each gained one."""
    num_draft_tokens: list[int] = field(default_factory=list)
    """How many drafts were verified of each sequence that sampled, if any were."""
    num_draft_tokens_wanted: list[int] = field(default_factory=list)
    """For how many each of them should have room from now on, if that has changed for any."""
    vectors: list[SequenceVectors] = field(default_factory=list)
    barred_sequence_ids: list[int] = field(default_factory=list)
    """Those of the failed sequences whose logits were finite: their parameters or their form allow no token."""
