"""The scheduler's decisions for a step, the worker's answer, and what that means for each sequence."""

from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.placement.choice import Placement


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step: compute this many tokens, then sample or not."""

    sequence: Sequence
    num_tokens: int
    samples: bool


class BlockTableUpdate(NamedTuple):
    """The table of a known sequence from `start` on."""

    sequence_id: int
    start: int
    block_ids: list[int]


class NewSequence(NamedTuple):
    """A sequence that the worker does not know; `num_computed_tokens` are in its blocks before this step."""

    sequence: Sequence
    block_ids: list[int]
    num_computed_tokens: int


class Fork(NamedTuple):
    """A sequence that the worker makes of another one's first `num_tokens` tokens, and of those that are its own."""

    parent_id: int
    child: Sequence
    num_tokens: int
    block_ids: list[int]
    num_computed_tokens: int


@dataclass(slots=True)
class SchedulerOutput:
    """One step of one worker, to be encoded before the next one is planned.

    `ignored` groups ended while planning, with their `error` set.
    """

    step_id: int
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    num_samples: int = 0
    """How many of them sample."""
    is_plain: bool = False
    """Whether each of them computes one token and samples the next, without room for guesses, and none is a beam."""
    new_sequences: list[NewSequence] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    block_table_updates: list[BlockTableUpdate] = field(default_factory=list)
    blocks_to_swap_out: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of device and host block, copied first."""
    blocks_to_swap_in: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of host and device block, copied second."""
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of device blocks, copied third."""
    num_draft_tokens: dict[Sequence, int] = field(default_factory=dict)
    """How many of a sequence's tokens are room for drafts, which the worker makes and verifies."""
    finished: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    ignored: list[SequenceGroup] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    """Waiting groups that this step takes, or that it left to other workers: those should be asked now."""
    moved: list[Placement] = field(default_factory=list)
    """Swapped groups that went back to waiting, because another worker has room for them."""
    lacking_adapters: list[str] = field(default_factory=list)
    """Adapters that waiting groups need and the worker does not hold, for which it is worth it to bring them there."""
    ask_again_at: float | None = None
    """When `schedule` should be called again at the latest: a group is left to another worker until then."""
    num_tokens: int = 0
    """Tokens of the step, without room for drafts."""
    planned_at: float = 0.0
    prompts_began: float | None = None
    """When the step was planned, if it computes prompts in a phase of their own."""
    dropped: set[Sequence] = field(default_factory=set)
    """Sequences that were preempted by recompute after this step was sent: its answer is not for them."""

    @property
    def is_empty(self) -> bool:
        """Whether the worker has nothing to do or to learn."""
        swaps = self.blocks_to_swap_out or self.blocks_to_swap_in
        return not (self.scheduled or self.finished or self.preempted or swaps)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: entry 0 is the token that stands there, then the likeliest ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """The rank of the token that stands there, 1 for the likeliest."""


@dataclass(slots=True)
class ModelOutput:
    """The worker's answer: one token for each sequence that samples, in the order of `SchedulerOutput.scheduled`.

    `num_tokens`, where there are any, counts what each of them gained: accepted draft tokens come before the token
    that was sampled after the last of them. A sequence of which a worker has yet to read what it has written in its
    form gained none, and computes its last token again. `num_draft_tokens`, likewise, are those that were verified, and
    `num_draft_tokens_wanted` those that steps should have room for from now on; without any that is as it was.
    """

    step_id: int
    token_ids: list[int]
    num_tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Log-probabilities of each token that a sequence gained, by sequence id."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failed_sequence_ids: frozenset[int] = frozenset()
    barred_sequence_ids: frozenset[int] = frozenset()
    """The failed sequences whose logits were finite: their parameters or their form allow no token."""
    num_draft_tokens: list[int] = field(default_factory=list)
    num_draft_tokens_wanted: list[int] = field(default_factory=list)
    vectors: dict[int, bytes] = field(default_factory=dict)
    """Vectors that were pooled of a sequence's states, by sequence id."""

    @property
    def has_tokens_alone(self) -> bool:
        """Whether it reports nothing but tokens, of sequences that none failed of."""
        return not (self.logprobs or self.prompt_logprobs or self.vectors or self.failed_sequence_ids)

    @property
    def is_plain(self) -> bool:
        """Whether it has one token for each sequence that samples, and says nothing else."""
        return self.has_tokens_alone and not (self.num_tokens or self.num_draft_tokens_wanted)


class SequenceOutput(NamedTuple):
    """The gain of a sequence: nothing (`token_id` None) while its prompt is computed, else one token.

    A beam search reports once, when it is over: its outputs are the hypotheses of the sequence's group.
    `prompt_logprobs` belong to the positions from `prompt_start` on. A sequence that is pooled gains no token, but
    `vectors`; those of tokens belong to the positions from the one before `prompt_start` on.
    """

    sequence: Sequence
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_start: int = 0
    goes_on: bool = False
    """Whether the same answer has more for the sequence, whose status is not yet what it is now."""
    vectors: bytes = b""
