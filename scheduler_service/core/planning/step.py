"""A step while it is planned: what is left of its budget, and what has been decided of it so far.

How large a step is on the wire is bounded from above by arithmetic: nothing is encoded to find out.
Most of a step is small: of a sequence that the worker knows, a few numbers. What can be large is telling the worker of
a sequence for the first time, of what its encoder reads, or of a block table that is another one after a swap. So
these are counted in bytes, as chunks are counted in tokens: a step may tell of sequences until
`SchedulerConfig.max_step_bytes` are spent. The last one may go beyond that, so the first always fits, however large it
is; the others are told of in later steps.

Why no step comes near the 64 MiB that a message may have: besides `max_step_bytes`, 8 MiB, it holds one sequence, of
at most 5 bytes for each token of the context and what a request of 16 MiB can say of its sampling; at most 16 MiB of
blocks to swap (4,194,304 blocks a worker, in pairs of device and host); and 64 bytes or less for each sequence in the
step. Answers need no budget of their own, because they are counted in tokens: a prompt's position has at most 20
log-probabilities besides its own, which makes 194 bytes, and a beam less than 2 KB. 131,072 tokens and 8,192 sequences
in a step, the most that the settings allow, make 42 MB.
"""

from scheduler_service.core.blocks.found_runs import FoundRuns
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.groups.sampling_params import SamplingParams
from scheduler_service.core.groups.sequence import EncoderSequence, Sequence, SequenceGroup
from scheduler_service.core.outputs import ScheduledSequence
from scheduler_service.core.placement.choice import Placement
from scheduler_service.core.planning.queue_view import QueueView

NUMBER_BYTES = 5
"""The most that a number of 32 bits takes in a column."""
FIELDS_BYTES = 256
"""The most that everything of a fixed size takes: ids, counts, parameters, and the heads of the columns."""
CHARACTER_BYTES = 4
"""The most that a character takes."""
ENTRY_BYTES = 16
"""The most that the head of an entry takes: of a word, or of a biased token with its bias."""


def bytes_to_tell(sequence: Sequence, num_blocks: int) -> int:
    """The most bytes that it takes to tell the worker of a sequence whose block table has `num_blocks` entries.

    A worker that knows the sequence gets its table, one that knows its parent the tokens that are not the parent's as
    well, any other everything.
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
    return num_bytes + NUMBER_BYTES * num_numbers


def sampling_bytes(sampling: SamplingParams) -> int:
    """The most bytes that the lists and texts of the sampling parameters take."""
    num_numbers = len(sampling.eos_token_ids) + len(sampling.stop_token_ids) + len(sampling.allowed_token_ids)
    num_numbers += sum(map(len, sampling.bad_words))
    if sampling.transcript is not None:
        num_numbers += len(sampling.transcript.suppressed) + len(sampling.transcript.begin_suppressed)
    num_entries = len(sampling.logit_bias) + len(sampling.bad_words)
    return NUMBER_BYTES * num_numbers + ENTRY_BYTES * num_entries + CHARACTER_BYTES * len(sampling.form)


def swap_bytes(num_pairs: int) -> int:
    """The most bytes that it takes to have so many blocks copied."""
    return 2 * NUMBER_BYTES * num_pairs


class SchedulingBudget:
    """Tokens, sequences (never groups) and bytes left in a step, and tokens of encoders; made anew for every step.

    Whatever was taken for a sequence that is then preempted is given back in exactly that amount. Bytes may be
    overdrawn once: what is told with the last of them is told whole.
    """

    __slots__ = ("num_bytes", "num_encoder_tokens", "num_seqs", "num_tokens")

    def __init__(self, token_budget: int, max_num_seqs: int, num_bytes: int, num_encoder_tokens: int = 0) -> None:
        self.num_tokens = token_budget
        self.num_seqs = max_num_seqs
        self.num_bytes = num_bytes
        self.num_encoder_tokens = num_encoder_tokens

    @property
    def is_spent(self) -> bool:
        """Whether no further sequence can be taken into the step."""
        return self.num_tokens <= 0 or self.num_bytes <= 0

    def take(self, *, num_tokens: int = 0, num_seqs: int = 0, num_bytes: int = 0, num_encoder_tokens: int = 0) -> None:
        """Spend; raises ValueError rather than having tokens or sequences go below zero."""
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
    """One sequence's part of a step; `is_long` if it takes less than it has to compute, so as to leave room."""

    __slots__ = ("copies", "is_long", "num_bytes", "num_tokens", "sequence")

    def __init__(self, sequence: Sequence, num_tokens: int, num_bytes: int = 0, *, is_long: bool = False) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.num_bytes = num_bytes
        self.is_long = is_long
        self.copies: list[tuple[int, int]] = []


class Step:
    """Either repeats the plan of the step before (`steady`) or not; new groups may join it with `chunks` both ways."""

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
        self.given_up: set[bytes] = set()  # keys of blocks for which a group has waited for too long
        self.num_looked_up = 0  # hashes of blocks, for groups that wait
        self.runs: FoundRuns | None = None  # of prefixes, once one was looked up
        self.backlog: int | None = None  # tokens that running groups have yet to compute, once that was asked
        self.num_reserved = 0  # sequences of groups that wait for a prefix
        self.filled: set[int] = set()  # blocks that it fills and that can be found
        self.ignored: list[SequenceGroup] = []
        self.lacking_adapters: dict[str, None] = {}  # worth bringing here
        self.moved: list[Placement] = []
        self.placements: list[Placement] = []
        self.prompts: list[SequenceGroup] = []  # running groups that were behind, or are new, or back
        self.num_preempted = 0
        self.num_long = 0  # long chunks
        self.prompts_began: float | None = None
        self.steady: list[ScheduledSequence] = []  # the last step's plan, if this step repeats it
        self.needy: list[Sequence] = []  # those whose block tables grew, of it or for drafts
        self.rooms: dict[Sequence, int] = {}  # for drafts, behind the one token that these compute
        self.any_last = False  # whether one of it computes its last token but one
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that all groups take of the step, as it is planned by now, those of encoders included."""
        return self._token_budget - self.budget.num_tokens - self.budget.num_encoder_tokens

    def num_tokens_of(self, group: SequenceGroup) -> int:
        """Tokens that a group takes of the step, as it is planned by now, without those of its encoder."""
        num_repeated = sum(sequence.group is group for sequence, _, _ in self.steady)
        return num_repeated + _sizes(self.chunks.get(group, []))["num_tokens"]

    def take(self, group: SequenceGroup, chunks: list[Chunk]) -> None:
        """Give a group, whose sequences are counted already, these chunks."""
        self.chunks[group] = chunks
        self.num_long += sum(chunk.is_long for chunk in chunks)
        self.budget.take(**_sizes(chunks))

    def give_back(self, group: SequenceGroup) -> list[Chunk]:
        """Take a group out of the step, with all that it took; returns its chunks."""
        chunks = self.chunks.pop(group, [])
        self.num_long -= sum(chunk.is_long for chunk in chunks)
        self.budget.give_back(num_seqs=group.num_seqs, **_sizes(chunks))
        return chunks

    def reserve(self, num_seqs: int) -> None:
        """Keep so many sequences for a group that waits, as far as there are any left; half of all at most, so that
        those behind it go on."""
        num_seqs = min(num_seqs, self.budget.num_seqs, self._most_reserved - self.num_reserved)
        self.budget.take(num_seqs=num_seqs)
        self.num_reserved += num_seqs

    def release(self) -> None:
        """Keep none any more."""
        self.budget.give_back(num_seqs=self.num_reserved)
        self.num_reserved = 0

    def unfold(self) -> None:
        """Write a plan that was repeated as chunks, of which some can be taken out again."""
        repeated: dict[SequenceGroup, list[Chunk]] = {}
        for sequence, num_tokens, _ in self.steady:
            repeated.setdefault(sequence.group, []).append(Chunk(sequence, num_tokens))
        self.chunks = repeated | self.chunks
        self.steady, self.needy = [], []


def _sizes(chunks: list[Chunk]) -> dict[str, int]:
    """Amounts that chunks take of a budget."""
    num_encoder_tokens = sum(chunk.num_tokens for chunk in chunks if chunk.sequence.is_encoder)
    return {
        "num_tokens": sum(chunk.num_tokens for chunk in chunks) - num_encoder_tokens,
        "num_bytes": sum(chunk.num_bytes for chunk in chunks),
        "num_encoder_tokens": num_encoder_tokens,
    }
