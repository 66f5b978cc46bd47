"""Requests in the scheduler: a `SequenceGroup` is one request, a `Sequence` is one of its outputs.

The first live sequence of a group is the leader, which computes the prompt once. The other sequences of the group are
followers. A follower has no blocks until it forks the prompt's blocks from the leader. A preempted group starts again
in the same way: the leader first.

Steps can be planned before earlier steps are answered. A sequence's computed tokens include all tokens that the steps
sent so far compute. Only known tokens count as a sequence's tokens, not a token that is still being sampled. If all
known tokens of a sequence are computed, a step in flight samples its next token. The worker does steps in order, and
feeds a sampled token into its next step without the scheduler. If steps in flight have room for drafts, the number of
computed tokens is an upper bound.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from scheduler_service.core.groups.beam_search import BeamSearch
from scheduler_service.core.groups.encoder_input import EncoderInput
from scheduler_service.core.groups.records import History, PlacementRecord
from scheduler_service.core.groups.sampling_params import SamplingParams
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.groups.suspicion import Suspicion


class Sequence:
    """One output: prompt and generated tokens, and the number of tokens with keys and values on the worker.

    A worker's scheduler assigns a new `id` at each admission. While the sequence waits, the `id` is 0.
    """

    is_encoder = False

    __slots__ = (
        "block_keys",
        "candidates",
        "end_token_ids",
        "forked_from",
        "group",
        "id",
        "index",
        "is_known",
        "max_num_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_draft_tokens_wanted",
        "num_expected_blocks",
        "num_forked_tokens",
        "num_known_blocks",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_slots",
        "num_stored_tokens",
        "output_token_ids",
        "prompt_token_ids",
        "reports",
        "sampling",
        "score",
        "status",
        "stop_token_id",
    )

    def __init__(self, group: "SequenceGroup", index: int, output_token_ids: Iterable[int] = ()) -> None:
        self.id = 0
        self.group = group
        self.index = index
        self.sampling = group.sampling.for_index(index)
        # `reports` and `end_token_ids` are stored, because every step reads them for every sequence.
        self.reports = self.sampling.reports
        self.end_token_ids = self.sampling.end_token_ids
        self.prompt_token_ids = group.prompt_token_ids  # shared by all sequences of the group
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.output_token_ids = array("I", output_token_ids)
        self.max_num_tokens = 0  # Maximum tokens of prompt and output, on the worker that admitted the sequence.
        self.num_computed_tokens = 0  # Number of tokens that the steps sent so far compute.
        self.num_stored_tokens = 0  # Number of tokens that answered steps have computed.
        self.status = SequenceStatus.WAITING
        self.is_known = False  # Whether the worker knows the sequence in this session.
        self.num_known_blocks = 0  # Number of leading entries of the block table that are the same on the worker.
        self.stop_token_id: int | None = None
        self.num_slots = 0  # Number of tokens that the sequence's device blocks have room for.
        # Parent sequence whose first tokens this sequence shares; None once the worker knows this sequence.
        self.forked_from: Sequence | None = None
        self.num_forked_tokens = 0  # Number of first tokens that are shared with the parent sequence.
        self.num_draft_tokens = 0  # Number of draft tokens in steps in flight, which count as computed.
        self.num_draft_tokens_wanted = 0  # Number of draft tokens that each further step should have room for.
        self.score = 0.0  # Sum of the log-probabilities of a beam's tokens.
        # Likeliest next tokens of a beam; None before the worker's answer.
        self.candidates: list[tuple[int, float]] | None = None
        self.block_keys: list[bytes] = []  # Keys of the sequence's leading full blocks, as far as they were needed.
        self.num_published_blocks = 0  # Number of leading blocks whose keys are in the prefix cache.
        self.num_expected_blocks = 0  # Number of leading blocks that are published or expected; 0 if none is expected.

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output tokens, as a new list."""
        return [*self.prompt_token_ids, *self.output_token_ids]

    def tokens_between(self, start: int, stop: int) -> "array[int]":
        """The tokens from position `start` to position `stop`, as far as they exist."""
        num_prompt_tokens = self.num_prompt_tokens
        if start >= num_prompt_tokens:
            return self.output_token_ids[start - num_prompt_tokens : stop - num_prompt_tokens]
        tokens = self.prompt_token_ids[start:stop]
        if stop > num_prompt_tokens:
            tokens += self.output_token_ids[: stop - num_prompt_tokens]
        return tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that a step can compute: the known tokens that are not computed yet.

        If all known tokens are computed, the token that a step in flight samples counts as one token. A beam's next
        token is chosen among the candidates of all beams, so a beam can compute nothing before its step is answered.
        """
        num_left = self.num_prompt_tokens + len(self.output_token_ids) - self.num_computed_tokens
        if num_left > 0 or self.sampling.beam_width:
            return max(0, num_left)
        # the last token is never computed, only sampled
        return 1 if self.num_computed_tokens + 1 < self.max_num_tokens else 0

    def leave_worker(self) -> None:
        """Return to waiting. The sequence has no blocks any more, and will be new to the next worker."""
        self.id = 0
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0
        self.num_stored_tokens = 0
        self.is_known = False
        self.forked_from = None
        self.candidates = None
        self.num_draft_tokens = 0
        self.num_draft_tokens_wanted = 0
        self.num_known_blocks = 0
        self.num_published_blocks = 0

    def __repr__(self) -> str:
        return f"Sequence({self.id}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens})"


class EncoderSequence(Sequence):
    """The input of a group's encoder: prompt tokens that are computed in one step. An encoder's input is not an output,
    so `SequenceGroup.live` does not contain it."""

    is_encoder = True

    __slots__ = ("input",)

    def __init__(self, group: "SequenceGroup", encoder_input: EncoderInput) -> None:
        super().__init__(group, 0)
        self.input = encoder_input
        self.reports = False
        # `EncoderInput` makes `token_ids` an array
        self.prompt_token_ids = encoder_input.token_ids  # type: ignore[assignment]
        self.num_prompt_tokens = self.max_num_tokens = encoder_input.num_tokens

    @property
    def is_computed(self) -> bool:
        """Whether the steps sent so far compute the encoder's input."""
        return self.num_computed_tokens == self.num_prompt_tokens


@dataclass(slots=True, init=False, eq=False, repr=False)
class SequenceGroup:
    """One request: `sampling.n` sequences that start from the same prompt, or the running beams of a search.

    A request can continue where another scheduler stopped. A continued request has `output_token_ids`, the tokens of
    its outputs so far, by index. `ended` contains the indices of a continued request's complete outputs. The scheduler
    treats a continued request like a preempted group.
    """

    request_id: str
    priority: int
    """Groups with lower numbers run first, if the queue's policy uses priorities."""
    tenant: str
    """The tenant whose share of service the request uses."""
    adapter_id: str
    """Id of the adapter; empty for the base model."""
    arrived_at: float
    """Arrival time in seconds, by the clock of `Scheduler.schedule`."""
    rank: tuple[int, int]
    """Place of the group in its queue. No two groups have the same rank."""
    cache_root: bytes
    """Root of the chain of the group's block keys. Groups with equal root and adapter can share cached prefixes."""
    sampling: SamplingParams
    is_plain: bool
    """Whether the group's sequences gain only tokens: no log-probabilities, no vectors, no beams."""
    prompt_token_ids: "array[int]"
    """Prompt tokens, four bytes each. A prompt that is passed as an array is not copied, and must not change."""
    beams: BeamSearch | None
    sequences: list[Sequence]
    encoder: EncoderSequence | None
    """Input of an encoder-decoder model's encoder. The keys of cached blocks depend on this input, because the blocks'
    contents depend on it."""
    has_unforked: bool
    """Whether followers wait for the leader's prompt."""
    ended: frozenset[int]
    """Indices of the outputs that had ended when the request arrived."""
    suspicion: Suspicion | None
    """Evidence that the request causes the loss of workers. None until a worker is lost with the group in flight."""
    placement: PlacementRecord
    history: History
    trace_parent: str
    """Parent of the request's trace spans; empty without tracing."""
    error: str | None
    """Reason why the group ended without service, as a sentence for the client."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        sampling: SamplingParams,
        cache_root: bytes = b"",
        *,
        priority: int = 0,
        tenant: str = "",
        adapter_id: str = "",
        encoder_input: EncoderInput | None = None,
        arrived_at: float = 0.0,
        output_token_ids: tuple[SequenceOf[int], ...] = (),
        ended: frozenset[int] = frozenset(),
    ) -> None:
        self.request_id = request_id
        self.priority = priority
        self.tenant = tenant
        self.adapter_id = adapter_id
        self.arrived_at = arrived_at
        self.rank = (0, 0)
        self.cache_root = cache_root
        self.sampling = sampling
        self.is_plain = not sampling.reports
        self.prompt_token_ids = (
            prompt_token_ids if isinstance(prompt_token_ids, array) else array("I", prompt_token_ids)
        )
        self.beams = BeamSearch(sampling) if sampling.beam_width else None
        num_sequences = 1 if self.beams else sampling.n
        outputs = dict(enumerate(output_token_ids))
        self.sequences = [Sequence(self, index, outputs.get(index, ())) for index in range(num_sequences)]
        self.encoder = None if encoder_input is None else EncoderSequence(self, encoder_input)
        self.has_unforked = num_sequences > 1
        self.ended = ended
        for index in ended:
            self.sequences[index].status = SequenceStatus.FINISHED_STOPPED
        self.suspicion = None
        self.placement = PlacementRecord()
        self.history = History()
        self.trace_parent = ""
        self.error = None

    def disband(self) -> None:
        """Drop the sequences of a group that has ended, once no code needs the sequences.

        Group and sequences refer to each other, so an ended group with sequences would stay in memory until Python's
        garbage collector runs.
        """
        self.sequences = []
        self.encoder = None

    @property
    def is_suspect(self) -> bool:
        """Whether this group may cause the loss of workers, and must be scheduled alone."""
        return self.suspicion is not None and self.suspicion.is_grave

    @property
    def lost_on(self) -> frozenset[str]:
        """The workers that were lost with this group in flight."""
        return frozenset() if self.suspicion is None else self.suspicion.lost_on

    def max_num_tokens(self, max_sequence_tokens: int) -> int:
        """Tokens of the prompt and the longest output, at most `max_sequence_tokens`. The result is more than the
        prompt's tokens, so that at least one token can be sampled."""
        num_prompt_tokens = len(self.prompt_token_ids)
        return max(min(num_prompt_tokens + self.sampling.max_tokens, max_sequence_tokens), num_prompt_tokens + 1)

    @property
    def output_token_ids(self) -> tuple[SequenceOf[int], ...]:
        """The token ids of each output so far, by index; an empty tuple if all outputs are empty."""
        outputs = tuple(sequence.output_token_ids for sequence in self.sequences)
        return outputs if any(outputs) else ()

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs together. A beam search counts the tokens of its hypotheses or of its beams, whichever
        are more."""
        found = 0 if self.beams is None else sum(len(hypothesis.token_ids) for hypothesis in self.beams.hypotheses)
        return max(found, sum(sequence.num_output_tokens for sequence in self.sequences))

    @property
    def live(self) -> list[Sequence]:
        """The sequences that have not finished. The first live sequence is the leader."""
        return [sequence for sequence in self.sequences if not sequence.status.is_finished]

    @property
    def with_tables(self) -> list[Sequence]:
        """All sequences that can have a block table: the live sequences, and then the encoder's input."""
        return self.live if self.encoder is None else [*self.live, self.encoder]

    @property
    def encoder_input(self) -> EncoderInput | None:
        return None if self.encoder is None else self.encoder.input

    @property
    def num_encoder_tokens(self) -> int:
        return 0 if self.encoder is None else self.encoder.num_prompt_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, including the encoder's input."""
        return len(self.prompt_token_ids) + self.num_encoder_tokens

    @property
    def waits_for_encoder(self) -> bool:
        """Whether no step has computed the encoder's input yet."""
        return self.encoder is not None and not self.encoder.is_computed

    @property
    def is_behind(self) -> bool:
        """Whether the group must compute its encoder's input, or several tokens of a sequence, before it can decode."""
        return self.waits_for_encoder or any(sequence.num_uncomputed_tokens > 1 for sequence in self.live)

    @property
    def num_seqs(self) -> int:
        """Number of sequences that the group counts as in a step's budget: its live sequences, or the width of its beam
        search."""
        return len(self.live) if self.beams is None else self.beams.width

    @property
    def is_finished(self) -> bool:
        return all(sequence.status.is_finished for sequence in self.sequences)
