"""Requests as the scheduler sees them: a `SequenceGroup` is one request, a `Sequence` one of its outputs.

Within a group the first live sequence is the leader: it computes the prompt once, and its followers, which hold no
blocks until then, fork the prompt's blocks from it. A preempted group starts again the same way.

Steps may be planned before the answers to earlier ones. A sequence's computed tokens count what every step sent so far
computes; its tokens are those that are known. One whose tokens are all computed has its next one sampled in a step
that is in flight, and the worker, which works in step order, goes on from it by itself.
"""

import enum
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace


class SequenceStatus(enum.Enum):
    """Where a sequence stands."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()

    @property
    def is_finished(self) -> bool:
        return self not in (SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.SWAPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop, with every default filled in.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 are off. `eos_token_ids`
    are the tokens that end the output silently (empty with ignore_eos), `stop_token_ids` those that the request
    named. `logprobs` None asks for none, 0 for the chosen token's alone.
    """

    max_tokens: int
    n: int = 1
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    def for_index(self, index: int) -> "SamplingParams":
        """The parameters of one output: prompt log-probabilities are computed once, with the first."""
        return self if index == 0 or self.prompt_logprobs is None else replace(self, prompt_logprobs=None)


# A group that was alone in the last of this many lost steps, without a token between them, is ended.
MAX_LOST_STEPS = 3


class Sequence:
    """One output: prompt and generated tokens, and how many of them have keys and values on the worker.

    `id` is given by a worker's scheduler on admission, a new one each time; while the sequence waits it is 0.
    """

    __slots__ = (
        "block_keys",
        "forked_from",
        "group",
        "id",
        "index",
        "is_known",
        "max_num_tokens",
        "num_computed_tokens",
        "num_known_blocks",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_slots",
        "num_stored_tokens",
        "sampling",
        "status",
        "stop_token_id",
        "token_ids",
    )

    def __init__(self, group: "SequenceGroup", index: int, token_ids: list[int]) -> None:
        self.id = 0
        self.group = group
        self.index = index
        self.sampling = group.sampling.for_index(index)
        self.token_ids = token_ids
        self.num_prompt_tokens = len(token_ids)
        self.max_num_tokens = 0  # prompt and output, on the worker that it was admitted to
        self.num_computed_tokens = 0  # by the steps sent so far
        self.num_stored_tokens = 0  # by the steps that were answered
        self.status = SequenceStatus.WAITING
        self.is_known = False  # to the worker of the current session
        self.num_known_blocks = 0  # leading entries of its block table that the worker knows as they are now
        self.stop_token_id: int | None = None
        self.num_slots = 0  # tokens that its device blocks have room for
        self.forked_from: Sequence | None = None  # whose tokens it begins with, until the worker knows it
        self.block_keys: list[bytes] = []  # of its leading full blocks, as far as they were needed
        self.num_published_blocks = 0  # leading blocks that are in the prefix cache, or that another one is there for

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that a step could compute: the known ones that are left, or else the one that is being sampled."""
        num_left = len(self.token_ids) - self.num_computed_tokens
        if num_left > 0:
            return num_left
        return 1 if self.num_computed_tokens + 1 < self.max_num_tokens else 0  # the last token is never computed

    def __repr__(self) -> str:
        return f"Sequence({self.id}, {self.status.name}, {self.num_computed_tokens}/{len(self.token_ids)})"


class SequenceGroup:
    """One request: `sampling.n` sequences that start from the same prompt.

    `error` says, in a sentence for the client, why a group ended without being served. `has_unforked` is set while
    followers wait for the leader's prompt; until they fork for the first time they share one list of its tokens.
    `num_lost_steps` counts the steps that a worker was lost in since the group last gained a token. Groups of equal
    `cache_root` may share cached prefixes; `num_cached_tokens` is what was found of the prompt when it was first
    admitted. `arrived_at` is in seconds of the clock that `Scheduler.schedule` is told.
    """

    __slots__ = (
        "arrived_at",
        "cache_root",
        "error",
        "has_unforked",
        "num_cached_tokens",
        "num_lost_steps",
        "priority",
        "prompt_token_ids",
        "rank",
        "request_id",
        "sampling",
        "sequences",
        "tenant",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        sampling: SamplingParams,
        cache_root: bytes = b"",
        *,
        priority: int = 0,
        tenant: str = "",
        arrived_at: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.priority = priority
        self.tenant = tenant
        self.arrived_at = arrived_at
        self.rank = 0  # of a queue that orders by rank
        self.cache_root = cache_root
        self.num_cached_tokens: int | None = None
        self.sampling = sampling
        self.prompt_token_ids = list(prompt_token_ids)
        self.sequences = [Sequence(self, 0, list(prompt_token_ids))]
        self.sequences += [Sequence(self, index, self.prompt_token_ids) for index in range(1, sampling.n)]
        self.has_unforked = sampling.n > 1
        self.num_lost_steps = 0
        self.error: str | None = None

    @property
    def is_suspect(self) -> bool:
        """Whether two lost steps in a row make it likely that this group is what workers are lost to."""
        return self.num_lost_steps >= MAX_LOST_STEPS - 1

    @property
    def live(self) -> list[Sequence]:
        """The sequences that have not finished; the first is the leader."""
        return [sequence for sequence in self.sequences if not sequence.status.is_finished]

    @property
    def is_finished(self) -> bool:
        return all(sequence.status.is_finished for sequence in self.sequences)
