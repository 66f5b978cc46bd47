"""Requests in the scheduler: a `SequenceGroup` is one request, a `Sequence` is one of its outputs.

The first live sequence of a group is the leader, which computes the prompt once. The followers have no blocks until
they fork the prompt's blocks from the leader. A preempted group starts again in the same way.

Steps can be planned before earlier steps are answered. Computed tokens include those of all steps sent so far; with
drafts in flight, their number is an upper bound. A sequence's tokens are its known tokens, without a token that is
still being sampled. The worker feeds a sampled token into its next step without the scheduler.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from scheduler_service.core.groups.beam_search import BeamSearch
from scheduler_service.core.groups.encoder_input import EncoderInput
from scheduler_service.core.groups.prompt_item import PromptItem
from scheduler_service.core.groups.records import History, PlacementRecord
from scheduler_service.core.groups.sampling_params import SamplingParams
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.groups.suspicion import Suspicion


class Sequence:
    """One output: prompt, generated tokens, and progress on the worker. Each admission assigns a new `id`; 0 while
    waiting."""

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
        "num_kept_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_shared_tokens",
        "num_slots",
        "num_stored_tokens",
        "output_token_ids",
        "prompt_token_ids",
        "releases_at",
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
        # Stored, because every step reads both for every sequence.
        self.reports = self.sampling.reports
        self.end_token_ids = self.sampling.end_token_ids
        self.prompt_token_ids = group.prompt_token_ids  # shared by the group
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.output_token_ids = array("I", output_token_ids)
        self.max_num_tokens = 0  # of prompt and output, on this worker
        self.num_computed_tokens = 0  # by the steps sent so far
        self.num_stored_tokens = 0  # by answered steps
        self.status = SequenceStatus.WAITING
        self.is_known = False  # whether the worker knows the sequence
        self.stop_token_id: int | None = None
        self.num_slots = 0  # tokens that the device blocks have room for
        self.releases_at = 0  # computed tokens before which no further block is behind a window
        # Parent, whose first tokens are shared; None once the worker knows this sequence.
        self.forked_from: Sequence | None = None
        self.num_forked_tokens = 0  # first tokens shared with the parent
        self.num_draft_tokens = 0  # in steps in flight; count as computed
        self.num_draft_tokens_wanted = 0  # room in each further step
        self.score = 0.0  # sum of a beam's log-probabilities
        # A beam's likeliest next tokens; None before the worker's answer.
        self.candidates: list[tuple[int, float]] | None = None
        self.block_keys: list[bytes] = []  # of leading full blocks, as far as needed
        self.num_published_blocks = 0  # leading blocks in the prefix cache
        self.num_expected_blocks = 0  # leading blocks, published or expected; 0 if none is expected
        self.num_shared_tokens = 0  # first tokens whose blocks were cached, perhaps without states
        self.num_kept_tokens = 0  # tokens before the last states of the output that were kept for the cache

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output_token_ids]

    def tokens_between(self, start: int, stop: int) -> "array[int]":
        num_prompt_tokens = self.num_prompt_tokens
        if start >= num_prompt_tokens:
            return self.output_token_ids[start - num_prompt_tokens : stop - num_prompt_tokens]
        tokens = self.prompt_token_ids[start:stop]
        if stop > num_prompt_tokens:
            tokens += self.output_token_ids[: stop - num_prompt_tokens]
        return tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that are not computed yet or, if there are none, 1 for the token that a step in flight samples.

        A beam's next token is chosen among the candidates of all beams, so a beam waits for its step's answer.
        """
        num_left = self.num_prompt_tokens + len(self.output_token_ids) - self.num_computed_tokens
        if num_left > 0 or self.sampling.beam_width:
            return max(0, num_left)
        # The last token is never computed, only sampled.
        return 1 if self.num_computed_tokens + 1 < self.max_num_tokens else 0

    def leave_worker(self) -> None:
        """Return to waiting. The sequence will be new to the next worker."""
        self.id = 0
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0
        self.num_stored_tokens = 0
        self.is_known = False
        self.forked_from = None
        self.candidates = None
        self.num_draft_tokens = 0
        self.num_draft_tokens_wanted = 0
        self.num_published_blocks = 0
        self.num_shared_tokens = 0
        self.num_kept_tokens = 0
        self.releases_at = 0

    def __repr__(self) -> str:
        return f"Sequence({self.id}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens})"


class EncoderSequence(Sequence):
    """The input of a group's encoder: prompt tokens that are computed in one step. `live` does not contain it."""

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
        return self.num_computed_tokens == self.num_prompt_tokens


@dataclass(slots=True, init=False, eq=False, repr=False)
class SequenceGroup:
    """One request: `sampling.n` sequences with the same prompt, or the running beams of a search.

    A request that another scheduler began has `output_token_ids`, its tokens so far, and `ended`, the indices of its
    complete outputs.
    """

    request_id: str
    priority: int
    """Lower numbers run first, if the queue's policy uses priorities."""
    tenant: str
    """Tenant whose share of service the request uses."""
    adapter_id: str
    """Empty for the base model."""
    arrived_at: float
    """Seconds, by the clock of `Scheduler.schedule`."""
    rank: tuple[int, int]
    """Place in the queue, different for each group."""
    cache_root: bytes
    """Root of the block keys. Groups with equal root and adapter can share cached prefixes."""
    sampling: SamplingParams
    is_plain: bool
    """Whether the group gains only tokens: no log-probabilities, vectors or beams."""
    prompt_token_ids: "array[int]"
    """Four bytes each. A prompt that is passed as an array is not copied, and must not change."""
    items: tuple[PromptItem, ...]
    """Parts of the prompt that are not text, in order."""
    images: tuple[PromptItem, ...]
    """The items that a worker must encode."""
    largest_image: int
    """Tokens; 0 without images."""
    beams: BeamSearch | None
    sequences: list[Sequence]
    encoder: EncoderSequence | None
    """Input of an encoder-decoder model's encoder, on which cached blocks depend."""
    has_unforked: bool
    """Whether followers wait for the leader's prompt."""
    ended: frozenset[int]
    """Indices of outputs that had ended when the request arrived."""
    suspicion: Suspicion | None
    """None until a worker is lost with the group in flight."""
    placement: PlacementRecord
    history: History
    trace_parent: str
    """Parent of the request's trace spans; empty without tracing."""
    error: str | None
    """Reason why the group ended without service, as a sentence for the client."""
    ends: tuple[SequenceStatus, ...]
    """Statuses of the outputs of a disbanded group."""

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
        items: tuple[PromptItem, ...] = (),
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
        self.items = items
        self.images = tuple([item for item in items if item.image is not None]) if items else ()
        self.largest_image = max([item.num_embeddings for item in self.images], default=0)
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
        self.ends = ()

    def disband(self) -> None:
        """Drop the sequences of an ended group, which refer to the group and would need the garbage collector."""
        self.ends = tuple(sequence.status for sequence in self.sequences)
        self.sequences = []
        self.encoder = None
        self.items = ()
        self.images = tuple([item._replace(data=b"") for item in self.images])

    @property
    def is_suspect(self) -> bool:
        """Whether this group may cause the loss of workers, and must run alone."""
        return self.suspicion is not None and self.suspicion.is_grave

    @property
    def lost_on(self) -> frozenset[str]:
        return frozenset() if self.suspicion is None else self.suspicion.lost_on

    def max_num_tokens(self, max_sequence_tokens: int) -> int:
        """Tokens of the prompt and the longest output, at most `max_sequence_tokens` but more than the prompt's."""
        num_prompt_tokens = len(self.prompt_token_ids)
        return max(min(num_prompt_tokens + self.sampling.max_tokens, max_sequence_tokens), num_prompt_tokens + 1)

    @property
    def output_token_ids(self) -> tuple[SequenceOf[int], ...]:
        """The tokens of each output, by index; empty if all outputs are empty."""
        outputs = tuple(sequence.output_token_ids for sequence in self.sequences)
        return outputs if any(outputs) else ()

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs; in a beam search, of its hypotheses or of its beams, whichever number is larger."""
        found = 0 if self.beams is None else sum(len(hypothesis.token_ids) for hypothesis in self.beams.hypotheses)
        return max(found, sum(sequence.num_output_tokens for sequence in self.sequences))

    @property
    def live(self) -> list[Sequence]:
        """The sequences that have not finished, the leader first."""
        return [sequence for sequence in self.sequences if not sequence.status.is_finished]

    @property
    def with_tables(self) -> list[Sequence]:
        """The sequences that can have a block table: the live sequences, and then the encoder's input."""
        return self.live if self.encoder is None else [*self.live, self.encoder]

    @property
    def encoder_input(self) -> EncoderInput | None:
        return None if self.encoder is None else self.encoder.input

    @property
    def num_encoder_tokens(self) -> int:
        return 0 if self.encoder is None else self.encoder.num_prompt_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt and of the encoder's input."""
        return len(self.prompt_token_ids) + self.num_encoder_tokens

    @property
    def waits_for_encoder(self) -> bool:
        """Whether no step has computed the encoder's input yet."""
        return self.encoder is not None and not self.encoder.is_computed

    @property
    def is_behind(self) -> bool:
        """Whether the encoder's input, or several tokens of a sequence, must be computed before the group can
        decode."""
        return self.waits_for_encoder or any(sequence.num_uncomputed_tokens > 1 for sequence in self.live)

    @property
    def num_seqs(self) -> int:
        """Sequences in a step's budget: the live sequences, or the width of the beam search."""
        return len(self.live) if self.beams is None else self.beams.width

    @property
    def is_finished(self) -> bool:
        return all(sequence.status.is_finished for sequence in self.sequences)
