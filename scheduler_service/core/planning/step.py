"""A step while it is planned: what is left of its budget, and what has been decided of it so far."""

from scheduler_service.core.blocks.found_runs import FoundRuns
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.outputs import ScheduledSequence
from scheduler_service.core.placement.choice import Placement
from scheduler_service.core.planning.budget import SchedulingBudget
from scheduler_service.core.planning.queue_view import QueueView


class Chunk:
    """What one sequence takes of a step; `is_long` if it takes less than it has to compute, so as to leave room."""

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
        "lacking_loras",
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
        self.lacking_loras: dict[str, None] = {}  # worth bringing here
        self.moved: list[Placement] = []
        self.placements: list[Placement] = []
        self.prompts: list[SequenceGroup] = []  # running groups that were behind, or are new, or back
        self.num_preempted = 0
        self.num_long = 0  # long chunks
        self.prompts_began: float | None = None
        self.steady: list[ScheduledSequence] = []  # the last step's plan, when it holds again
        self.needy: list[Sequence] = []  # those whose block tables grew, of it or for guesses
        self.rooms: dict[Sequence, int] = {}  # for guesses, behind the one token that these compute
        self.any_last = False  # whether one of it computes its last token but one
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []

    @property
    def num_tokens(self) -> int:
        """What all groups take of the step, as it is planned by now, tokens of encoders included."""
        return self._token_budget - self.budget.num_tokens - self.budget.num_encoder_tokens

    def num_tokens_of(self, group: SequenceGroup) -> int:
        """What a group takes of the step, as it is planned by now, without tokens of its encoder."""
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
    """What chunks take of a budget."""
    num_encoder_tokens = sum(chunk.num_tokens for chunk in chunks if chunk.sequence.is_encoder)
    return {
        "num_tokens": sum(chunk.num_tokens for chunk in chunks) - num_encoder_tokens,
        "num_bytes": sum(chunk.num_bytes for chunk in chunks),
        "num_encoder_tokens": num_encoder_tokens,
    }
