"""The worker's types for steps and answers, without protobuf. `codec.py` checks all values that do not depend on live
sequences, and `session.py` the rest."""

import enum
from array import array
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pagewire_common.images.layout import ImageLayouts
from pagewire_common.sampling import LOGIT_EDITS, SamplerParams
from worker_service.session.items import EncoderItem, ImageToEncode, PromptItem

TOKENS = "q"
"""Type code of token ids and block numbers: 64-bit integers, which torch reads without conversion."""
Tables = tuple["array[int]", ...]


class LayerLimits(NamedTuple):
    """A group of layers with a block table of its own."""

    block_size: int
    """Tokens of a block; 0 if the layers have states. A sequence then has one block."""
    window: int
    """Tokens; 0 without a window."""
    chunked: bool = False
    """Whether a token attends to its own chunk of `window` tokens."""


@dataclass(frozen=True)
class Limits:
    """The limits of steps, by model, memory and settings."""

    block_size: int
    """Tokens of a block or, with several groups of layers, of a whole number of each group's blocks."""
    num_device_blocks: int
    num_host_blocks: int
    vocabulary_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    num_speculative_tokens: int = 0
    """Drafts of one sequence in one step."""
    max_loras: int = 0
    """Different LoRA adapters in one step."""
    max_cpu_loras: int = 0
    """LoRA adapters in host memory."""
    embedding_size: int = 0
    """Length of the vectors from pooling; 0 if the worker cannot pool."""
    num_labels: int = 0
    """Labels of the model's classifier; 0 without a classifier."""
    max_encoder_len: int = 0
    """Tokens of an encoder input of an encoder-decoder; 0 for other models."""
    max_num_encoder_tokens: int = 0
    """Tokens of all encoder inputs in one step."""
    feature_bytes: int = 0
    """Bytes of an encoder input's audio features; 0 if the encoder reads token ids."""
    layer_groups: tuple[LayerLimits, ...] = ()
    """The groups of layers if there are several or if layers have states: without a window, with a window, with
    states."""
    aligns: bool = False
    """Whether the worker can compute the times of a transcript's tokens."""
    prompt_embeds_size: int = 0
    """Elements of a token's embedding in a prompt; 0 if prompts cannot contain embeddings."""
    images: ImageLayouts | None = None
    """The tokens of images; None if prompts cannot contain images."""
    encoder_cache_size: int = 0
    """Tokens whose image embeddings the worker keeps."""
    encoder_budget: int = 0
    """Tokens of images that are encoded in one step, if there are several."""

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of a block in each group of layers. States are those of a sequence of any length."""
        return tuple(group.block_size or self.max_model_len for group in self.layer_groups) or (self.block_size,)

    def has_states(self, group: int) -> bool:
        """Whether the layers of this group have states."""
        return bool(self.layer_groups) and not self.layer_groups[group].block_size

    @property
    def is_encoder(self) -> bool:
        """Whether the model computes whole texts, without keys and values."""
        return not self.num_device_blocks


@dataclass(frozen=True)
class WorkerInfo:
    """Further properties that a scheduler needs before it opens a session."""

    model_id: str
    model_fingerprint: str
    dtype: str
    device: str
    features: tuple[str, ...]
    sliding_window: int
    """Tokens; 0 without a window. Blocks behind the window are never read again."""
    swap_bytes_per_second: int
    prefill_tokens_per_second: int
    block_bytes: int
    lora_copy_seconds: float = 0.0
    """Seconds to copy the largest possible LoRA adapter to the device."""
    pooling_type: "PoolingType | None" = None
    """The pooling with which the model was trained, or None for a classifier."""
    normalizes: bool = False
    """Whether the model was trained with vectors of length 1."""


class PoolingType(enum.Enum):
    """How a text's hidden states become one vector, or one vector for each token."""

    CLS = enum.auto()
    MEAN = enum.auto()
    LAST = enum.auto()
    ALL = enum.auto()
    SCORE = enum.auto()
    """The classifier's scores of the text."""
    ALIGNMENT = enum.auto()
    """When the newest transcript tokens are spoken, in encoder tokens from the audio's start."""


@dataclass(frozen=True)
class PoolingParams:
    """See the protobuf message PoolingParams."""

    type: PoolingType
    dimensions: int
    normalize: bool = False
    half: bool = False
    num_first_tokens: int = 0
    num_sound_tokens: int = 0


@dataclass(frozen=True)
class TranscriptParams:
    """Rules for a transcript of speech. See the protobuf message TranscriptParams."""

    first_timestamp: int = 0
    max_initial: int = 0
    num_text_tokens: int = 0
    suppressed: tuple[int, ...] = ()
    begin_suppressed: tuple[int, ...] = ()


@dataclass(frozen=True)
class SamplingParams(SamplerParams):
    """See the protobuf messages GroupSampling and NewSequence."""

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
    """A digest of the tenant. Bans and time limits of a form apply to each tenant separately."""
    pooling: PoolingParams | None = None
    """None if the sequence samples tokens."""
    transcript: TranscriptParams | None = None
    is_beam: bool = False

    @cached_property
    def edits_logits(self) -> bool:
        """Whether logits are edited before sampling. Temperature, top-k and top-p are no edits."""
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
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class NewSequence:
    sequence_id: int
    token_ids: "array[int]"
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: "array[int]"
    sampling: SamplingParams
    adapter: str = ""
    """The fingerprint of the LoRA adapter; empty for the base model."""
    is_encoder: bool = False
    """Whether the sequence is an encoder input. For audio, `token_ids` are placeholders."""
    features: bytes = b""
    """Audio features of an encoder input: float32, little-endian, all frames of one mel bin after the other."""
    encoder_id: int = 0
    """The sequence that is this sequence's encoder input; 0 for none."""
    further_tables: Tables = ()
    """The block tables of further groups of layers."""
    items: tuple[PromptItem, ...] = ()
    """Parts of the prompt that are not text, in order."""


@dataclass(frozen=True)
class BlockTableUpdate:
    """Replaces the entries of a block table from index `start` on."""

    sequence_id: int
    start: int
    block_ids: "array[int]"
    layer_group: int = 0


@dataclass(frozen=True)
class Fork:
    """A new sequence with its parent's parameters and first `num_tokens` tokens, followed by `token_ids`."""

    parent_id: int
    child_id: int
    num_tokens: int
    num_computed_tokens: int
    block_ids: "array[int]"
    index: int
    token_ids: "array[int]" = field(default_factory=lambda: array(TOKENS))
    further_tables: Tables = ()


@dataclass(frozen=True)
class BlockMapping:
    """Block `sources[i]` is copied to block `destinations[i]`. No destination occurs twice."""

    sources: tuple[int, ...] = ()
    destinations: tuple[int, ...] = ()


@dataclass(frozen=True)
class SchedulerOutput:
    """The work of one step. `sequence_ids`, `num_scheduled_tokens` and `samples` are columns, one entry for each
    chunk."""

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
    dropped_items: tuple[bytes, ...] = ()
    """Digests of items that the session drops before it adds sequences."""
    num_draft_tokens: tuple[int, ...] = ()
    """A column: scheduled tokens that are reserved for drafts. Empty if no sequence may have drafts."""
    items_to_encode: tuple[EncoderItem, ...] = ()
    dropped_embeddings: tuple[EncoderItem, ...] = ()
    """Encoded images that the worker drops before it encodes others."""
    items_ahead: tuple[EncoderItem, ...] = ()
    """Images that the worker prepares for later steps."""
    images: tuple[ImageToEncode, ...] = ()
    """The images of `items_to_encode`, which the session adds."""
    images_ahead: tuple[ImageToEncode, ...] = ()
    """The images of `items_ahead`, which the session adds, without those that it lacks or has encoded."""

    @property
    def moves_blocks(self) -> bool:
        return bool(self.blocks_to_swap_out.sources or self.blocks_to_swap_in.sources or self.blocks_to_copy.sources)


@dataclass(frozen=True)
class SampleLogprobs:
    """Columns of log-probabilities of one sequence. Each position has `width` entries: its token, then the likeliest
    tokens."""

    sequence_id: int
    width: int
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    """The rank of the token at each position; 1 is the likeliest."""


@dataclass(frozen=True)
class SequenceVectors:
    """The vectors of one pooled sequence."""

    sequence_id: int
    data: bytes
    """The numbers of one vector after the other: float32 or float16, little-endian."""


@dataclass(frozen=True)
class StepTiming:
    """Durations in microseconds."""

    move_us: int
    forward_us: int
    sample_us: int
    guess_us: int = 0
    encode_us: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of moves, forward pass and sampling."""
        return (self.move_us + self.forward_us + self.sample_us) / 1e6


@dataclass(frozen=True)
class ModelOutput:
    token_ids: list[int]
    """The gained tokens, in the order of the chunks; 0 if sampling failed."""
    timing: StepTiming
    logprobs: list[SampleLogprobs] = field(default_factory=list)
    prompt_logprobs: list[SampleLogprobs] = field(default_factory=list)
    failed_sequence_ids: list[int] = field(default_factory=list)
    """Sequences without a token, or with vectors or prompt log-probabilities that are not finite."""
    num_tokens: list[int] = field(default_factory=list)
    """Tokens that each sampling sequence gained; empty if each gained one."""
    num_draft_tokens: list[int] = field(default_factory=list)
    """Verified drafts of each sampling sequence; empty without drafts."""
    num_draft_tokens_wanted: list[int] = field(default_factory=list)
    """Drafts for which the scheduler should reserve tokens, for each sampling sequence; empty if unchanged."""
    vectors: list[SequenceVectors] = field(default_factory=list)
    barred_sequence_ids: list[int] = field(default_factory=list)
    """Failed sequences whose parameters or output form allow no token, although logits are finite."""
    failed_items: list[EncoderItem] = field(default_factory=list)
    """Images of `items_to_encode` that could not be decoded."""
    prepared_items: list[EncoderItem] = field(default_factory=list)
    """The images ahead that a later step can encode without a delay."""
