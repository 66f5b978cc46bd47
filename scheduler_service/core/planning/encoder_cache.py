"""Decides in which step a worker encodes an image, and whose embeddings it keeps.

A chunk needs every image that it touches (here always: or part of one, if the worker encodes the parts of an image on
their own). An image is encoded in the step whose chunk first needs it. A chunk ends before an image for which the
worker's cache has no room or the step no budget.

Encoding takes up to seconds, for which every sequence of the step would wait. So a worker that can (`prepares_images`)
prepares in the background what running sequences need next, and reports it. A chunk ends before an image that is not
prepared, also before its first token. If nothing can be computed, a step without chunks asks for the next report.

A sequence that has touched an image uses it until all of its tokens are computed. A used image is never dropped, so the
sequence can always compute to the end of the image without further room. Unused images are kept, and the least recently
read are dropped first. A group that is swapped out uses none: it could not compute, and others would wait for its room.

Where the tokens of an image attend to each other in both directions (`images_attend_both_ways`), all of them must be
computed in one step, or be cached. A chunk then ends before such an image or after it, and may exceed other limits than
the step's tokens.

During planning, only the tokens of used images count. What is dropped is decided when the step is written, so a chunk
that is taken back leaves no trace.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.groups.prompt_item import EncoderItem, Items, PromptItem, items_between, without_cut
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.outputs import SchedulerOutput

MAX_AHEAD = 4
"""Images that a worker prepares at the same time. Each takes memory for its pixels."""


@dataclass(slots=True)
class EncoderCounts:
    """Over a session. A query is a sequence that begins to use an image; a hit needs no encoding."""

    num_queries: int = 0
    num_hits: int = 0
    num_encoded: int = 0
    num_encoded_tokens: int = 0

    def __add__(self, other: "EncoderCounts") -> "EncoderCounts":
        return EncoderCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class EncoderCache:
    """The embeddings that one worker keeps. All numbers are tokens."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._size, self._budget = config.encoder_cache_size, config.encoder_budget
        # What the worker has after the steps written so far, the least recently read first.
        self._kept: OrderedDict[EncoderItem, int] = OrderedDict()
        self._num_kept = 0
        self._planned: dict[EncoderItem, int] = {}  # encoded by the step that is being planned
        # The last place of each image that a sequence uses, by sequence.
        self.users: dict[Sequence, dict[EncoderItem, PromptItem]] = {}
        self._num_users: dict[EncoderItem, int] = {}
        self._num_used = 0
        # Since the last step was written.
        self.encoded: list[EncoderItem] = []
        self.dropped: list[EncoderItem] = []
        self.counts = EncoderCounts()
        self._ahead: frozenset[EncoderItem] = frozenset()  # in the last step
        self._prepared: frozenset[EncoderItem] = frozenset()
        self._prepares, self._attend_both_ways = config.prepares_images, config.images_attend_both_ways
        self.waits = False
        """True if a chunk may contain an image that the worker has not reported as prepared."""

    # ---- planning

    def prepared(self, names: Iterable[EncoderItem]) -> None:
        """Note all that the worker has prepared. It forgets what the last step does not name."""
        self._prepared = self._ahead.intersection(names)

    def are_prepared(self, names: Iterable[EncoderItem]) -> bool:
        return self._prepared.issuperset(names)

    def settle(self) -> None:
        """Before a step is planned, stop using the images whose tokens are computed."""
        for sequence, used in [*self.users.items()]:
            for name, item in [*used.items()]:
                if _has_computed(sequence, item):
                    self._stop_using(sequence, name)

    def reach(self, images: Items, start: int, num_tokens: int, most: int = 0) -> int:
        """How many of the `num_tokens` tokens after the first `start` a chunk can have in the planned step. `most`: the
        limit of a chunk that must have more, to end with an image."""
        if self._attend_both_ways:
            num_tokens = without_cut(images, start, num_tokens, max(num_tokens, most))
        room, num_planned, own = self._size - self._num_used, sum(self._planned.values()), set[EncoderItem]()
        for item in items_between(images, start, start + num_tokens):
            name, number = item.encoder_item, item.num_embeddings
            if name in self._num_users or name in own:
                continue
            is_new = name not in self._kept
            if number > room or (is_new and num_planned and num_planned + number > self._budget):
                return max(0, item.start - start)
            is_prepared = not self._prepares or self.waits or name in self._prepared
            if is_new and not is_prepared:
                return max(0, item.start - start)
            own.add(name)
            room -= number
            num_planned += number if is_new else 0
        return num_tokens

    def use(self, sequence: Sequence, num_tokens: int) -> None:
        """Use the images that a planned chunk touches, which must be within `reach`."""
        start = sequence.num_computed_tokens
        for item in items_between(sequence.group.images, start, start + num_tokens):
            name = item.encoder_item
            if name not in self.users.get(sequence, ()):
                self.counts.num_queries += 1
                self.counts.num_hits += name in self._kept or name in self._planned
            if name not in self._kept:
                self._planned[name] = item.num_embeddings
            self._start_using(sequence, item)
        assert self._num_used <= self._size, "a chunk needs more images than the encoder cache has room for"

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Let a fork use its parent's image until the fork has computed the last prompt token."""
        for item in self.users.get(parent, {}).values():
            if not _has_computed(child, item):
                self._start_using(child, item)

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Stop using the images of sequences that left the device, or whose chunks were taken back."""
        for sequence in sequences:
            for name in [*self.users.get(sequence, ())]:
                self._stop_using(sequence, name)

    def _start_using(self, sequence: Sequence, item: PromptItem) -> None:
        used, name = self.users.setdefault(sequence, {}), item.encoder_item
        if name not in used:
            if name not in self._num_users:
                self._num_used += item.num_embeddings
            self._num_users[name] = self._num_users.get(name, 0) + 1
        used[name] = item

    def _stop_using(self, sequence: Sequence, name: EncoderItem) -> None:
        used = self.users[sequence]
        item = used.pop(name)
        if not used:
            del self.users[sequence]
        self._num_users[name] -= 1
        if not self._num_users[name]:
            del self._num_users[name]
            self._num_used -= item.num_embeddings
            self._planned.pop(name, None)

    @property
    def num_used(self) -> int:
        """Tokens of the images that sequences use."""
        return self._num_used

    # ---- writing

    def read(self, sequence: Sequence, num_tokens: int) -> None:
        """Note what a written chunk reads, and encode the images that it is the first to need."""
        start = sequence.num_computed_tokens
        for item in items_between(sequence.group.images, start, start + num_tokens):
            name = item.encoder_item
            if name in self._kept:
                self._kept.move_to_end(name)
                continue
            self._kept[name] = number = self._planned.pop(name)
            self._num_kept += number
            self.counts.num_encoded += 1
            self.counts.num_encoded_tokens += number
            self.encoded.append(name)

    def written(self, output: SchedulerOutput) -> None:
        """Write what the step encodes, and drop what then has no room. A step with neither needs no call."""
        if self._num_kept > self._size:
            for name in [*self._kept]:
                if name not in self._num_users:
                    self._drop(name)
                    if self._num_kept <= self._size:
                        break
        output.num_encoded_tokens = sum([self._kept[name] for name in self.encoded])
        output.items_to_encode, self.encoded = self.encoded, []
        output.dropped_embeddings, self.dropped = self.dropped, []

    def ahead(self, groups: Iterable[SequenceGroup]) -> dict[EncoderItem, SequenceGroup]:
        """After a step's chunks are written: the first images that running groups, in their order, need next."""
        found: dict[EncoderItem, SequenceGroup] = {}
        for sequence in [sequence for group in groups if group.images for sequence in group.live if sequence.is_known]:
            for item in items_between(sequence.group.images, sequence.num_computed_tokens, sequence.num_prompt_tokens):
                if item.encoder_item not in self._kept and len(found) < MAX_AHEAD:
                    found.setdefault(item.encoder_item, sequence.group)
                break
        return found

    def told(self, ahead: Iterable[EncoderItem]) -> None:
        """Note what the worker prepares from this step on."""
        self._ahead = frozenset(ahead)
        self._prepared &= self._ahead

    def fail(self, names: Iterable[EncoderItem]) -> None:
        """Drop images that the worker could not decode. The worker keeps their room until it is told."""
        for name in names:
            for sequence in [one for one, used in self.users.items() if name in used]:
                self._stop_using(sequence, name)
            if name in self._kept:
                self._drop(name)

    def _drop(self, name: EncoderItem) -> None:
        self._num_kept -= self._kept.pop(name)
        self.dropped.append(name)

    def check(self) -> None:
        """Assert that the sums equal the parts, and that between steps all used images are kept, for running groups."""
        users = [name for used in self.users.values() for name in used]
        assert self._num_users == {name: users.count(name) for name in users}
        sizes = {name: item.num_embeddings for used in self.users.values() for name, item in used.items()}
        assert self._num_used == sum(sizes.values()) <= self._size
        assert self._num_kept == sum(self._kept.values()) <= self._size
        assert sizes.keys() <= self._kept.keys()
        assert not self._planned
        assert all(sequence.status is SequenceStatus.RUNNING for sequence in self.users)


def _has_computed(sequence: Sequence, item: PromptItem) -> bool:
    """Whether a sequence will not compute a token of an item again. A sequence that is late computes its last known
    token again, and so the last prompt token until a step that computes it was answered with a token."""
    if sequence.num_computed_tokens < item.stop:
        return False
    is_last = item.stop == sequence.num_prompt_tokens
    return not (is_last and sequence.sampling.form) or sequence.num_stored_tokens >= item.stop
