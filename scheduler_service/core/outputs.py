"""The plan of a step, the worker's answer, and the result for each sequence."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_service.core.groups.prompt_item import EncoderItem
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.placement.choice import Placement


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step. `samples`: whether the next token is sampled."""

    sequence: Sequence
    num_tokens: int
    samples: bool


class BlockTableUpdate(NamedTuple):
    """A known sequence's block table from entry `start` on."""

    sequence_id: int
    start: int
    block_ids: list[int]
    layer_group: int = 0


class NewSequence(NamedTuple):
    """A sequence that is new to the worker. Its blocks contain its first `num_computed_tokens` tokens."""

    sequence: Sequence
    block_ids: list[int]
    num_computed_tokens: int
    further_tables: SequenceOf[list[int]] = ()
    """The block tables of further groups of layers."""
    items_sent: frozenset[bytes] = frozenset()
    """Digests of the prompt's items that the worker does not have."""


class Fork(NamedTuple):
    """A sequence that starts with the first `num_tokens` tokens of a parent sequence."""

    parent_id: int
    child: Sequence
    num_tokens: int
    block_ids: list[int]
    num_computed_tokens: int
    further_tables: SequenceOf[list[int]] = ()


@dataclass(slots=True)
class SchedulerOutput:
    """One step of one worker. The caller must encode a step before it plans the next step."""

    step_id: int
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    num_samples: int = 0
    is_plain: bool = False
    """Whether each sequence computes one token and samples the next, without drafts and beams."""
    new_sequences: list[NewSequence] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    block_table_updates: list[BlockTableUpdate] = field(default_factory=list)
    blocks_to_swap_out: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of device and host block, which the worker copies first."""
    blocks_to_swap_in: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of host and device block, copied second."""
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of source and target block on the device, copied third."""
    num_draft_tokens: dict[Sequence, int] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    dropped_items: list[bytes] = field(default_factory=list)
    """Digests of items that the worker drops before it takes new sequences."""
    items_to_encode: SequenceOf[EncoderItem] = ()
    """Images that the worker encodes, in this order, before it computes the chunks."""
    num_encoded_tokens: int = 0
    """Tokens of these images."""
    dropped_embeddings: SequenceOf[EncoderItem] = ()
    """Encoded images that the worker drops before it encodes others."""
    images_ahead: dict[EncoderItem, SequenceGroup] = field(default_factory=dict)
    """Images that the worker prepares for later steps, the most urgent first, each with a group that needs it."""
    ignored: list[SequenceGroup] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    """Waiting groups that this step admits, or leaves to other workers, whose next steps should be planned now."""
    moved: list[Placement] = field(default_factory=list)
    """Swapped groups that returned to the queue, because another worker has room for them."""
    lacking_adapters: list[str] = field(default_factory=list)
    """Adapters that waiting groups need and that are worth fetching."""
    ask_again_at: float | None = None
    """Latest time for the next call of `schedule`, because a waiting group may start then."""
    num_tokens: int = 0
    """Tokens that the step computes, without room for drafts."""
    planned_at: float = 0.0
    prompts_began: float | None = None
    """Time when the step was planned, if phases are separate and the step computes prompts."""
    dropped: set[Sequence] = field(default_factory=set)
    """Sequences that were preempted by recompute after the step was sent. The step's answer skips them."""

    @property
    def is_empty(self) -> bool:
        """True if the step computes, copies and awaits nothing, and names no new or ended sequence."""
        swaps = self.blocks_to_swap_out or self.blocks_to_swap_in
        others = self.new_sequences or self.forks or self.images_ahead
        return not (self.scheduled or self.finished or self.preempted or swaps or others)

    @property
    def times_images(self) -> bool:
        """True if the worker may wait for an image. The step's time then says nothing about its tokens."""
        return bool(self.items_to_encode or (self.images_ahead and not self.scheduled))


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the position's token, then the likeliest tokens."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the position's token; the likeliest token has rank 1."""


@dataclass(slots=True)
class ModelOutput:
    """The worker's answer: one token for each sequence that samples, in the order of `SchedulerOutput.scheduled`.

    `num_tokens` counts the tokens that each sequence gained, accepted drafts first; empty if each gained one token. A
    late sequence gained none, because its output form is still being parsed, and computes its last token again.
    `num_draft_tokens` counts verified drafts; `num_draft_tokens_wanted` asks for room in further steps (empty: as
    before).
    """

    step_id: int
    token_ids: list[int]
    num_tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """One entry for each gained token, by sequence id."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failed_sequence_ids: frozenset[int] = frozenset()
    barred_sequence_ids: frozenset[int] = frozenset()
    """Failed sequences with finite logits, whose parameters or output form allow no token."""
    failed_items: SequenceOf[EncoderItem] = ()
    """Images of the step's `items_to_encode` that could not be decoded."""
    prepared_items: SequenceOf[EncoderItem] = ()
    """The images ahead that later steps can encode without a delay."""
    num_draft_tokens: list[int] = field(default_factory=list)
    num_draft_tokens_wanted: list[int] = field(default_factory=list)
    vectors: dict[int, bytes] = field(default_factory=dict)
    """Pooled vectors, by sequence id."""

    @property
    def has_tokens_alone(self) -> bool:
        return not (
            self.logprobs or self.prompt_logprobs or self.vectors or self.failed_sequence_ids or self.failed_items
        )

    @property
    def is_plain(self) -> bool:
        """Whether the answer contains exactly one token for each sequence that samples, and nothing more."""
        return self.has_tokens_alone and not (self.num_tokens or self.num_draft_tokens_wanted)


class SequenceOutput(NamedTuple):
    """The result for one sequence: one token, or None while the prompt is computed.

    A beam search has one result, at its end; its outputs are the `hypotheses` of the group's `beams`. `prompt_logprobs`
    has one entry for each prompt position from `prompt_start` on. The first of several `vectors` belongs to position
    `prompt_start` - 1.
    """

    sequence: Sequence
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_start: int = 0
    goes_on: bool = False
    """Whether the answer contains further results for the sequence, whose status is that after the last."""
    vectors: bytes = b""
