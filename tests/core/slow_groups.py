"""Requests and the queue of the slow scheduler: lists, and rules that are evaluated anew each time."""

import itertools

from slow_images import SlowImage

from scheduler_service.core import SamplingParams, SequenceStatus
from scheduler_service.core.groups.beam_search import BeamSearch

Key = tuple[int, int, bytes, tuple[int, ...], tuple[int, ...] | str, tuple[SlowImage, ...]]
"""The index of a block, its group of layers, a salt, the encoder's tokens, the decoder's tokens up to the end of the
block's page (or a word for the encoder), and the images among them."""


class Block:
    """Keys and values: their tokens once known, and whether the block is the cached one."""

    key: Key | None = None
    is_found = False


Table = list[Block | None]


class SlowSequence:
    is_encoder = False

    def __init__(self, group: "SlowGroup", index: int, token_ids: list[int]) -> None:
        self.group, self.index, self.token_ids = group, index, token_ids
        self.num_prompt_tokens = len(group.prompt)
        self.max_num_tokens = 0
        self.score, self.candidates = 0.0, None
        self.status: SequenceStatus | None = None  # once it has ended
        self.num_lives = 0  # one more each time it begins anew
        self.begin_anew()

    def begin_anew(self) -> None:
        self.num_lives += 1
        self.computed = self.stored = 0  # by the steps planned, and by those answered
        self.num_offered = 0  # pages that were offered to the prefix cache
        self.num_expected = 0  # pages that it is known to be going to compute
        self.num_shared = 0  # its first pages that were cached when it was admitted, perhaps without states
        self.is_stale = False  # whether it began before the cache was reset
        self.kept_page: int | None = None  # the last page of its output after which states were kept
        self.device: list[Table] | None = None  # a table for each group of layers; an encoder has one
        self.host: list[Table] | None = None
        self.is_known = False
        self.is_table_known = False
        self.parent: SlowSequence | None = None  # whose tokens it begins with, and how many
        self.num_parents_tokens = 0
        self.candidates = None
        self.num_wanted = 0  # draft tokens that there should be room for
        self.begun: list[SlowImage] = []  # that it has read from since it was placed on the device
        self.num_drafted = 0  # draft tokens that there is room for in the steps that are not answered yet

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def uncomputed(self) -> int:
        left = len(self.token_ids) - self.computed
        if left > 0 or self.group.beams:
            return max(0, left)
        return int(self.computed + 1 < self.max_num_tokens)

    @property
    def label(self) -> tuple[str, int, int]:
        return self.group.name, self.index, len(self.token_ids)


class SlowEncoder(SlowSequence):
    """The encoder's input of a group."""

    is_encoder = True

    @property
    def uncomputed(self) -> int:
        return len(self.token_ids) - self.computed


class SlowGroup:
    def __init__(
        self,
        name: str,
        prompt: list[int],
        sampling: SamplingParams,
        root: bytes,
        encoder: tuple[int, ...] = (),
        images: tuple[SlowImage, ...] = (),
        **about: object,
    ) -> None:
        self.name, self.prompt, self.sampling, self.root = name, prompt, sampling, root
        self.images = images
        self.priority, self.tenant, self.lora, self.arrived_at = (
            about[key] for key in ("priority", "tenant", "lora", "arrived_at")
        )
        self.rank = (0, 0)
        self.number = 0  # in the order of arrival
        self.num_cached: int | None = None
        self.first_missing: int | None = None  # page, while it waits for others
        self.waits_until = 0.0
        self.num_overtaken = 0
        self.beams = BeamSearch(sampling) if sampling.beam_width else None
        num_sequences = 1 if self.beams else sampling.n
        self.sequences = [SlowSequence(self, index, list(prompt)) for index in range(num_sequences)]
        self.encoder = SlowEncoder(self, 0, list(encoder)) if encoder else None

    @property
    def live(self) -> list[SlowSequence]:
        return [sequence for sequence in self.sequences if sequence.status is None]

    @property
    def live_and_encoder(self) -> list[SlowSequence]:
        return [*self.live, self.encoder] if self.encoder else self.live

    @property
    def encoder_tokens(self) -> list[int]:
        return self.encoder.token_ids if self.encoder else []

    @property
    def is_behind(self) -> bool:
        is_encoded = self.encoder is None or not self.encoder.uncomputed
        return not is_encoded or any(sequence.uncomputed > 1 for sequence in self.live)

    @property
    def num_seqs(self) -> int:
        return self.sampling.beam_width or len(self.live)


class SlowQueue:
    """A list in order of arrival, and the rule that chooses the next group."""

    def __init__(self, policy: str, overtakes: int = 64, weights: dict[str, float] | None = None) -> None:
        self.policy, self.overtakes, self.weights = policy, overtakes, weights or {}
        self.groups: list[SlowGroup] = []
        self.num_arrivals = 0
        self.served: dict[str, float] = {}  # a tenant's counter
        self.last_to_leave = ""  # a tenant

    def arrive(self, group: SlowGroup) -> None:
        group.number = self.num_arrivals
        group.rank = (group.priority * self.overtakes + self.num_arrivals, self.num_arrivals)
        self.num_arrivals += 1
        self.raise_counter(group.tenant)
        self.groups.append(group)

    def put_back(self, group: SlowGroup) -> None:
        """Insert before later arrivals, and before earlier ones that no worker has taken since."""
        self.raise_counter(group.tenant)
        others = [other for other in self.groups if self.policy != "fair" or other.tenant == group.tenant]
        older = list(itertools.takewhile(lambda other: other.number < group.number, others))
        self.groups.insert(self.groups.index(older[-1]) + 1 if older else 0, group)

    def leave(self, group: SlowGroup) -> None:
        self.groups.remove(group)
        self.last_to_leave = group.tenant

    def raise_counter(self, tenant: str) -> None:
        """A returning tenant has at least the lowest counter of waiting tenants, or else of the last one."""
        waiting = [self.served[group.tenant] for group in self.groups]
        lowest = min(waiting, default=self.served.get(self.last_to_leave, 0.0))
        self.served[tenant] = max(self.served.get(tenant, 0.0), lowest)

    def charge(self, group: SlowGroup, cost: float) -> None:
        self.served[group.tenant] += cost / self.weights.get(group.tenant, 1.0)

    @property
    def head(self) -> SlowGroup:
        return self.in_order()[0]

    def in_order(self) -> list[SlowGroup]:
        if self.policy == "priority":
            return sorted(self.groups, key=lambda group: group.rank)
        if self.policy == "fair":
            return sorted(self.groups, key=lambda group: (self.served[group.tenant], group.tenant))
        return self.groups

    def victim(self, running: list[SlowGroup]) -> SlowGroup:
        return max(running, key=lambda group: group.rank) if self.policy == "priority" else running[-1]

    def outranks(self, waiting: SlowGroup, running: SlowGroup) -> bool:
        return self.policy == "priority" and waiting.priority < running.priority and waiting.rank < running.rank
