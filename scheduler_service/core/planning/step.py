"""A step while it is planned: what is left of its budget, and what is decided so far.

The size of a step on the wire is bounded by arithmetic, without encoding. New sequences, their encoders' inputs, and
block tables after a swap share a budget of `max_step_bytes`. The last description may exceed this budget, so that a
sequence of any size fits an empty step.

No step reaches gRPC's limit of 64 MiB. Besides `max_step_bytes` (default 8 MiB), a step contains at most one more
description: 5 bytes for each token, and 16 MiB each of sampling parameters and of items. Lists of blocks to swap take
at most 16 MiB, and each sequence at most 64 bytes more.

The answer to the largest step, of 131,072 tokens and 8,192 sequences, takes at most 42 MB. A prompt position with 20
log-probabilities takes at most 194 bytes, a beam less than 2 KB.
"""

from scheduler_service.core.blocks.found_runs import FoundRuns
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.groups.prompt_item import data_bytes
from scheduler_service.core.groups.sampling_params import SamplingParams
from scheduler_service.core.groups.sequence import EncoderSequence, Sequence, SequenceGroup
from scheduler_service.core.outputs import ScheduledSequence
from scheduler_service.core.placement.choice import Placement
from scheduler_service.core.queues.waiting_queue import QueueView

NUMBER_BYTES = 5
"""Bytes of a 32-bit number in a packed column."""
FIELDS_BYTES = 256
"""Bytes of all fields of fixed size in a sequence's description."""
CHARACTER_BYTES = 4
"""Bytes of a character in UTF-8."""
ENTRY_BYTES = 16
"""Bytes of the header of an entry of `bad_words` or `logit_bias`."""
ITEM_BYTES = 64
"""Bytes of an item of a prompt, without its data."""


def bytes_to_tell(sequence: Sequence, num_blocks: int) -> int:
    """The maximum bytes that describe a sequence with `num_blocks` blocks to the worker.

    A worker that knows the sequence receives only the block table. A worker that knows the parent also receives the
    tokens that the parent does not have. Any other worker receives the complete sequence.
    """
    parent = sequence.forked_from
    num_numbers = num_blocks
    num_bytes = FIELDS_BYTES
    if sequence.is_known:
        pass
    elif isinstance(sequence, EncoderSequence):
        num_bytes += CHARACTER_BYTES * len(sequence.group.adapter_id)
        if not sequence.is_computed:
            num_numbers += len(sequence.input.token_ids)
            num_bytes += sequence.input.num_feature_bytes
    elif parent is not None and parent.is_known:
        num_numbers += sequence.num_tokens - sequence.num_forked_tokens
    else:
        num_numbers += sequence.num_tokens
        num_bytes += sampling_bytes(sequence.sampling) + CHARACTER_BYTES * len(sequence.group.adapter_id)
        num_bytes += ITEM_BYTES * len(sequence.group.items) + data_bytes(sequence.group.items)
    return num_bytes + NUMBER_BYTES * num_numbers


def sampling_bytes(sampling: SamplingParams) -> int:
    """The maximum bytes of the lists and the output form in sampling parameters."""
    num_numbers = len(sampling.eos_token_ids) + len(sampling.stop_token_ids) + len(sampling.allowed_token_ids)
    num_numbers += sum(map(len, sampling.bad_words))
    if sampling.transcript is not None:
        num_numbers += len(sampling.transcript.suppressed) + len(sampling.transcript.begin_suppressed)
    num_entries = len(sampling.logit_bias) + len(sampling.bad_words)
    return NUMBER_BYTES * num_numbers + ENTRY_BYTES * num_entries + CHARACTER_BYTES * len(sampling.form)


def swap_bytes(num_pairs: int) -> int:
    return 2 * NUMBER_BYTES * num_pairs


class SchedulingBudget:
    """The rest of a step's budget. The bytes can fall below 0, because the last sequence that fits is described
    completely."""

    __slots__ = ("num_bytes", "num_encoder_tokens", "num_seqs", "num_tokens")

    def __init__(self, token_budget: int, max_num_seqs: int, num_bytes: int, num_encoder_tokens: int = 0) -> None:
        self.num_tokens = token_budget
        self.num_seqs = max_num_seqs
        self.num_bytes = num_bytes
        self.num_encoder_tokens = num_encoder_tokens

    @property
    def is_spent(self) -> bool:
        """Whether the step has no room for a further sequence."""
        return self.num_tokens <= 0 or self.num_bytes <= 0

    def take(self, *, num_tokens: int = 0, num_seqs: int = 0, num_bytes: int = 0, num_encoder_tokens: int = 0) -> None:
        """Subtract amounts. Raises ValueError if the budget has too few tokens, sequences or encoder tokens."""
        if num_tokens > self.num_tokens or num_seqs > self.num_seqs or num_encoder_tokens > self.num_encoder_tokens:
            raise ValueError(
                f"budget exceeded: {num_tokens} of {self.num_tokens} tokens, {num_seqs} of {self.num_seqs} sequences, "
                f"{num_encoder_tokens} of {self.num_encoder_tokens} tokens of encoders"
            )
        self.num_tokens -= num_tokens
        self.num_seqs -= num_seqs
        self.num_bytes -= num_bytes
        self.num_encoder_tokens -= num_encoder_tokens

    def give_back(
        self, *, num_tokens: int = 0, num_seqs: int = 0, num_bytes: int = 0, num_encoder_tokens: int = 0
    ) -> None:
        self.num_tokens += num_tokens
        self.num_seqs += num_seqs
        self.num_bytes += num_bytes
        self.num_encoder_tokens += num_encoder_tokens


class Chunk:
    """One sequence's part of a step. `is_long`: uncomputed tokens are left to later steps."""

    __slots__ = ("copies", "is_long", "num_bytes", "num_tokens", "sequence")

    def __init__(self, sequence: Sequence, num_tokens: int, num_bytes: int = 0, *, is_long: bool = False) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.num_bytes = num_bytes
        self.is_long = is_long
        self.copies: list[tuple[int, int]] = []


class Step:
    """A step while it is planned. `steady` is the repeated plan of the step before; `chunks` are those of all other
    groups."""

    __slots__ = (
        "_most_reserved",
        "_token_budget",
        "any_last",
        "backlog",
        "budget",
        "chunks",
        "filled",
        "given_up",
        "ignored",
        "lacking_adapters",
        "moved",
        "needy",
        "now",
        "num_long",
        "num_looked_up",
        "num_preempted",
        "num_reserved",
        "placements",
        "prompts",
        "prompts_began",
        "queue",
        "rooms",
        "runs",
        "state_copies",
        "steady",
        "swap_in",
        "swap_out",
    )

    def __init__(self, config: SchedulerConfig, queue: QueueView, now: float) -> None:
        self.budget = SchedulingBudget(
            config.max_num_batched_tokens, config.max_num_seqs, config.max_step_bytes, config.max_num_encoder_tokens
        )
        self._most_reserved = config.max_num_seqs // 2
        self._token_budget = config.max_num_batched_tokens + config.max_num_encoder_tokens
        self.queue = queue
        self.now = now
        self.chunks: dict[SequenceGroup, list[Chunk]] = {}
        self.given_up: set[bytes] = set()  # keys of blocks for which a group gave up waiting
        self.num_looked_up = 0  # block hashes
        self.runs: FoundRuns | None = None  # None before the first lookup
        self.backlog: int | None = None  # tokens that running groups have not computed
        self.num_reserved = 0  # sequences for groups that wait for a prefix
        self.filled: set[int] = set()  # cached blocks that this step fills
        self.ignored: list[SequenceGroup] = []
        self.lacking_adapters: dict[str, None] = {}
        self.moved: list[Placement] = []
        self.placements: list[Placement] = []
        self.prompts: list[SequenceGroup] = []  # groups that compute prompts, or were admitted or resumed
        self.num_preempted = 0
        self.num_long = 0  # long chunks
        self.prompts_began: float | None = None
        self.steady: list[ScheduledSequence] = []
        self.state_copies: list[tuple[int, int]] = []  # source and target of states that are kept for the cache
        # Sequences in `steady` or with drafts whose block tables grew.
        self.needy: list[Sequence] = []
        self.rooms: dict[Sequence, int] = {}  # draft tokens
        self.any_last = False  # whether a sequence of `steady` samples its last token
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of all groups, as planned so far, including encoder tokens."""
        return self._token_budget - self.budget.num_tokens - self.budget.num_encoder_tokens

    def num_tokens_of(self, group: SequenceGroup) -> int:
        """Tokens of one group, as planned so far, without encoder tokens."""
        num_repeated = sum(sequence.group is group for sequence, _, _ in self.steady)
        return num_repeated + _sizes(self.chunks.get(group, []))["num_tokens"]

    def take(self, group: SequenceGroup, chunks: list[Chunk]) -> None:
        """Add a group's chunks. The group's sequences must have been taken from the budget already."""
        self.chunks[group] = chunks
        self.num_long += sum(chunk.is_long for chunk in chunks)
        self.budget.take(**_sizes(chunks))

    def give_back(self, group: SequenceGroup) -> list[Chunk]:
        """Remove a group, and give everything that it took back to the budget. Returns its chunks."""
        chunks = self.chunks.pop(group, [])
        self.num_long -= sum(chunk.is_long for chunk in chunks)
        self.budget.give_back(num_seqs=group.num_seqs, **_sizes(chunks))
        return chunks

    def reserve(self, num_seqs: int) -> None:
        """Reserve sequences for a waiting group: as many as are left, and at most half of the step's."""
        num_seqs = min(num_seqs, self.budget.num_seqs, self._most_reserved - self.num_reserved)
        self.budget.take(num_seqs=num_seqs)
        self.num_reserved += num_seqs

    def release(self) -> None:
        self.budget.give_back(num_seqs=self.num_reserved)
        self.num_reserved = 0

    def unfold(self) -> None:
        """Convert a repeated plan to chunks, so that some chunks can be removed."""
        repeated: dict[SequenceGroup, list[Chunk]] = {}
        for sequence, num_tokens, _ in self.steady:
            repeated.setdefault(sequence.group, []).append(Chunk(sequence, num_tokens))
        self.chunks = repeated | self.chunks
        self.steady, self.needy = [], []


def _sizes(chunks: list[Chunk]) -> dict[str, int]:
    num_encoder_tokens = sum(chunk.num_tokens for chunk in chunks if chunk.sequence.is_encoder)
    return {
        "num_tokens": sum(chunk.num_tokens for chunk in chunks) - num_encoder_tokens,
        "num_bytes": sum(chunk.num_bytes for chunk in chunks),
        "num_encoder_tokens": num_encoder_tokens,
    }
