"""A step while it is planned: what is left of its budget, and what is decided so far.

The size of a step on the wire is bounded by arithmetic, without encoding the step. Most of a step is small: a few
numbers for each sequence that the worker knows. Three parts of a step can be large: the description of a new sequence,
the input of its encoder, and a block table after a swap. The bytes of these three large parts are subtracted from a
byte budget, as the tokens of chunks are from the token budget. A step describes sequences until
`SchedulerConfig.max_step_bytes` are spent. The last description in a step may exceed this budget, so that a sequence of
any size fits an empty step. Sequences for which no bytes are left are described in later steps.

A gRPC message to a worker has at most 64 MiB, and no step comes near this limit. The descriptions of sequences take at
most `max_step_bytes`, which is 8 MiB by default, and one more description. A description takes at most 5 bytes for each
token of the sequence's context. The sampling parameters take at most 16 MiB, because the client's request has at most
16 MiB. Lists of blocks to swap take at most 16 MiB, because the lists name each of a worker's 4,194,304 blocks at most
once. Besides its description, each sequence in a step takes at most 64 bytes.

Answers need no byte budget, because the number of tokens in a step bounds the size of its answer. In an answer, a
prompt position takes at most 194 bytes for 20 log-probabilities and the log-probability of the prompt's token. In an
answer, a beam takes less than 2 KB. The settings allow at most 131,072 tokens and 8,192 sequences in a step. The answer
to the largest possible step takes at most 42 MB.
"""

from scheduler_service.core.blocks.found_runs import FoundRuns
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.groups.sampling_params import SamplingParams
from scheduler_service.core.groups.sequence import EncoderSequence, Sequence, SequenceGroup
from scheduler_service.core.outputs import ScheduledSequence
from scheduler_service.core.placement.choice import Placement
from scheduler_service.core.planning.queue_view import QueueView

NUMBER_BYTES = 5
"""Maximum bytes of a 32-bit number in a packed column."""
FIELDS_BYTES = 256
"""Maximum bytes of all fields of fixed size in a sequence's description: ids, counts, parameters, and headers of
columns."""
CHARACTER_BYTES = 4
"""Maximum bytes of a character in UTF-8."""
ENTRY_BYTES = 16
"""Maximum bytes of the header of an entry of `bad_words`, or of an entry of `logit_bias`."""


def bytes_to_tell(sequence: Sequence, num_blocks: int) -> int:
    """The maximum bytes that describe a sequence to the worker, if its block table has `num_blocks` entries.

    A worker that knows the sequence receives only the sequence's block table. A worker that knows only the parent
    sequence receives the block table, and the tokens that the parent does not have. A worker that knows neither the
    sequence nor the parent receives the complete sequence.
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
    """The maximum bytes of the lists and the output form in a request's sampling parameters."""
    num_numbers = len(sampling.eos_token_ids) + len(sampling.stop_token_ids) + len(sampling.allowed_token_ids)
    num_numbers += sum(map(len, sampling.bad_words))
    if sampling.transcript is not None:
        num_numbers += len(sampling.transcript.suppressed) + len(sampling.transcript.begin_suppressed)
    num_entries = len(sampling.logit_bias) + len(sampling.bad_words)
    return NUMBER_BYTES * num_numbers + ENTRY_BYTES * num_entries + CHARACTER_BYTES * len(sampling.form)


def swap_bytes(num_pairs: int) -> int:
    """The maximum bytes of a list of block pairs to copy."""
    return 2 * NUMBER_BYTES * num_pairs


class SchedulingBudget:
    """Tokens, sequences (not groups), bytes and encoder tokens that a step has left. Every step creates a new budget.

    If a sequence is preempted, exactly the amounts that were taken for it are given back. The remaining bytes can fall
    below 0, because the last sequence that fits is described completely.
    """

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
    """One sequence's part of a step. `is_long`: the chunk leaves some of the sequence's uncomputed tokens to later
    steps, so that other sequences have room."""

    __slots__ = ("copies", "is_long", "num_bytes", "num_tokens", "sequence")

    def __init__(self, sequence: Sequence, num_tokens: int, num_bytes: int = 0, *, is_long: bool = False) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.num_bytes = num_bytes
        self.is_long = is_long
        self.copies: list[tuple[int, int]] = []


class Step:
    """A step while it is planned. `steady` is the plan of the step before, if this step repeats that plan. `chunks` are
    the chunks of all groups that are not in `steady`."""

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
        self.given_up: set[bytes] = set()  # Keys of blocks for which a group gave up waiting.
        self.num_looked_up = 0  # Block hashes that were looked up for waiting groups.
        self.runs: FoundRuns | None = None  # Runs of cached prefix blocks; None before the first lookup.
        self.backlog: int | None = None  # Tokens that running groups have not computed; None until needed.
        self.num_reserved = 0  # Sequences that are reserved for groups that wait for a prefix.
        self.filled: set[int] = set()  # Blocks in the prefix cache that this step fills.
        self.ignored: list[SequenceGroup] = []
        self.lacking_adapters: dict[str, None] = {}  # adapters that are worth fetching for this worker
        self.moved: list[Placement] = []
        self.placements: list[Placement] = []
        self.prompts: list[SequenceGroup] = []  # groups that compute prompts, or are admitted or resumed
        self.num_preempted = 0
        self.num_long = 0  # number of long chunks in the step
        self.prompts_began: float | None = None
        self.steady: list[ScheduledSequence] = []  # The plan of the step before, if this step repeats it.
        # Sequences in `steady` or with room for drafts, whose block tables grew in this step.
        self.needy: list[Sequence] = []
        self.rooms: dict[Sequence, int] = {}  # Number of draft tokens that each sequence has room for in this step.
        self.any_last = False  # Whether a sequence of `steady` samples its last token.
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of all groups in the step, as planned so far, including encoder tokens."""
        return self._token_budget - self.budget.num_tokens - self.budget.num_encoder_tokens

    def num_tokens_of(self, group: SequenceGroup) -> int:
        """Tokens of one group in the step, as planned so far, without encoder tokens."""
        num_repeated = sum(sequence.group is group for sequence, _, _ in self.steady)
        return num_repeated + _sizes(self.chunks.get(group, []))["num_tokens"]

    def take(self, group: SequenceGroup, chunks: list[Chunk]) -> None:
        """Add a group's chunks to the step. The caller must have taken the group's sequences from the budget
        already."""
        self.chunks[group] = chunks
        self.num_long += sum(chunk.is_long for chunk in chunks)
        self.budget.take(**_sizes(chunks))

    def give_back(self, group: SequenceGroup) -> list[Chunk]:
        """Remove a group from the step, and give its tokens, bytes and sequences back to the budget. Returns the
        group's chunks."""
        chunks = self.chunks.pop(group, [])
        self.num_long -= sum(chunk.is_long for chunk in chunks)
        self.budget.give_back(num_seqs=group.num_seqs, **_sizes(chunks))
        return chunks

    def reserve(self, num_seqs: int) -> None:
        """Reserve sequences for a waiting group, as far as the budget has sequences left. At most half of the step's
        sequences are reserved, so that later groups can start."""
        num_seqs = min(num_seqs, self.budget.num_seqs, self._most_reserved - self.num_reserved)
        self.budget.take(num_seqs=num_seqs)
        self.num_reserved += num_seqs

    def release(self) -> None:
        """End all reservations."""
        self.budget.give_back(num_seqs=self.num_reserved)
        self.num_reserved = 0

    def unfold(self) -> None:
        """Convert a repeated plan to chunks, so that some of the chunks can be removed."""
        repeated: dict[SequenceGroup, list[Chunk]] = {}
        for sequence, num_tokens, _ in self.steady:
            repeated.setdefault(sequence.group, []).append(Chunk(sequence, num_tokens))
        self.chunks = repeated | self.chunks
        self.steady, self.needy = [], []


def _sizes(chunks: list[Chunk]) -> dict[str, int]:
    """The tokens, bytes and encoder tokens that chunks need."""
    num_encoder_tokens = sum(chunk.num_tokens for chunk in chunks if chunk.sequence.is_encoder)
    return {
        "num_tokens": sum(chunk.num_tokens for chunk in chunks) - num_encoder_tokens,
        "num_bytes": sum(chunk.num_bytes for chunk in chunks),
        "num_encoder_tokens": num_encoder_tokens,
    }
