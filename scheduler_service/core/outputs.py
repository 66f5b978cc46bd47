"""The plan of a step, the worker's answer, and the result for each sequence."""

from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.placement.choice import Placement


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step: the number of tokens to compute, and whether to sample the next token."""

    sequence: Sequence
    num_tokens: int
    samples: bool


class BlockTableUpdate(NamedTuple):
    """The block table of a sequence that the worker knows, from entry `start` on."""

    sequence_id: int
    start: int
    block_ids: list[int]


class NewSequence(NamedTuple):
    """A sequence that is new to the worker. Before this step, the sequence's blocks contain the keys and values of its
    first `num_computed_tokens` tokens."""

    sequence: Sequence
    block_ids: list[int]
    num_computed_tokens: int


class Fork(NamedTuple):
    """A sequence that starts with the first `num_tokens` tokens of a parent sequence, and continues with its own
    tokens."""

    parent_id: int
    child: Sequence
    num_tokens: int
    block_ids: list[int]
    num_computed_tokens: int


@dataclass(slots=True)
class SchedulerOutput:
    """One step of one worker. The caller must encode a step before it plans the next step.

    `ignored` are groups that ended during planning because they do not fit the worker; their `error` is set.
    """

    step_id: int
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    num_samples: int = 0
    """Number of scheduled sequences that sample a token."""
    is_plain: bool = False
    """Whether each scheduled sequence computes one token and samples the next, without room for drafts and without
    beams."""
    new_sequences: list[NewSequence] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    block_table_updates: list[BlockTableUpdate] = field(default_factory=list)
    blocks_to_swap_out: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of device block and host block, which the worker copies first."""
    blocks_to_swap_in: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of host block and device block, which the worker copies after `blocks_to_swap_out`."""
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of source and target block, both on the device, which the worker copies after `blocks_to_swap_in`."""
    num_draft_tokens: dict[Sequence, int] = field(default_factory=dict)
    """Number of draft tokens that each sequence has room for in this step. The worker proposes and verifies the
    drafts."""
    finished: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    ignored: list[SequenceGroup] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    """Waiting groups that this step admits, and waiting groups that it leaves to other workers. The caller should now
    plan the next step of each worker that a group was left to."""
    moved: list[Placement] = field(default_factory=list)
    """Swapped groups that returned to the queue, because another worker has room for them."""
    lacking_adapters: list[str] = field(default_factory=list)
    """Adapters that waiting groups need, and that are worth fetching for this worker."""
    ask_again_at: float | None = None
    """Time at which the caller should call `schedule` again at the latest, because a waiting group may start on this
    worker then."""
    num_tokens: int = 0
    """Number of tokens that the step computes, without room for drafts."""
    planned_at: float = 0.0
    prompts_began: float | None = None
    """Time when the step was planned, if phases are separate and the step computes prompts."""
    dropped: set[Sequence] = field(default_factory=set)
    """Sequences that were preempted by recompute after this step was sent. The answer to this step does not apply to
    sequences in `dropped`."""

    @property
    def is_empty(self) -> bool:
        """Whether the step has nothing to compute or copy, and names no sequence that left the worker."""
        swaps = self.blocks_to_swap_out or self.blocks_to_swap_in
        return not (self.scheduled or self.finished or self.preempted or swaps)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position. Entry 0 is the token at this position; the next entries are the likeliest
    tokens."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the token at this position; the likeliest token has rank 1."""


@dataclass(slots=True)
class ModelOutput:
    """The worker's answer: one token for each sequence that samples, in the order of `SchedulerOutput.scheduled`.

    `num_tokens` counts the tokens that each sequence gained; it is empty if each sequence gained one token. Accepted
    draft tokens come before the token that was sampled after them. A late sequence gained no token, because the worker
    has not yet matched the sequence's output with its output form (for example a JSON schema). A late sequence computes
    its last token again. `num_draft_tokens` counts the verified drafts of each sequence. `num_draft_tokens_wanted` is
    the number of drafts that further steps should have room for. If `num_draft_tokens_wanted` is empty, the room for
    drafts does not change.
    """

    step_id: int
    token_ids: list[int]
    num_tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Log-probabilities of the tokens that each sequence gained, by sequence id."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failed_sequence_ids: frozenset[int] = frozenset()
    barred_sequence_ids: frozenset[int] = frozenset()
    """Ids of the failed sequences whose logits were finite. For a barred sequence, the request's parameters or its
    output form allow no token."""
    num_draft_tokens: list[int] = field(default_factory=list)
    num_draft_tokens_wanted: list[int] = field(default_factory=list)
    vectors: dict[int, bytes] = field(default_factory=dict)
    """Vectors that were pooled from a sequence's hidden states, by sequence id."""

    @property
    def has_tokens_alone(self) -> bool:
        """Whether the answer contains only tokens, and no sequence failed."""
        return not (self.logprobs or self.prompt_logprobs or self.vectors or self.failed_sequence_ids)

    @property
    def is_plain(self) -> bool:
        """Whether the answer contains exactly one token for each sequence that samples, and nothing more."""
        return self.has_tokens_alone and not (self.num_tokens or self.num_draft_tokens_wanted)


class SequenceOutput(NamedTuple):
    """The result for one sequence: one token, or None while the prompt is computed.

    A beam search has one result, at its end. The outputs of a beam search are the `hypotheses` of the group's `beams`.
    `prompt_logprobs` has one entry for each prompt position from `prompt_start` on. A sequence of a pooling request
    gains `vectors` and no token. If `vectors` has one vector for each token, the first vector belongs to position
    `prompt_start` - 1.
    """

    sequence: Sequence
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_start: int = 0
    goes_on: bool = False
    """Whether the same answer contains further results for the sequence. `sequence.status` is the status after the
    answer's last result for the sequence."""
    vectors: bytes = b""
