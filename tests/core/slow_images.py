"""The encoder cache of a worker, derived anew from its sequences and the step's plan each time."""

import itertools
from typing import TYPE_CHECKING, NamedTuple

from scheduler_service.core import EncoderItem

if TYPE_CHECKING:
    from slow_groups import SlowGroup, SlowSequence
    from slow_scheduler import SlowScheduler


class SlowImage(NamedTuple):
    """An image, or a part of one, in a prompt."""

    name: EncoderItem
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


class SlowImages:
    def __init__(self, scheduler: "SlowScheduler") -> None:
        self.scheduler = scheduler
        self.size, self.budget = scheduler.config.encoder_cache_size, scheduler.config.encoder_budget
        self.are_whole = scheduler.config.images_attend_both_ways
        self.prepared: set[EncoderItem] = set()
        self.told: list[EncoderItem] = []  # what the last step prepares
        self.kept: dict[EncoderItem, int] = {}  # tokens, in the order in which steps read them last

    def are_too_large(self, group: "SlowGroup") -> bool:
        config = self.scheduler.config
        room = config.max_num_batched_tokens - (config.max_num_seqs - 1) if self.are_whole else self.size
        return any(image.num_tokens > min(self.size, room) for image in group.images)

    def touched(self, group: "SlowGroup", start: int, stop: int) -> list[SlowImage]:
        return [image for image in group.images if max(start, image.start) < min(stop, image.stop)]

    def planned(self) -> list[SlowImage]:
        """What the step's chunks touch."""
        chunks = [chunk for chunk in self.scheduler.plan if not chunk[0].is_encoder]
        return [image for s, n, _ in chunks for image in self.touched(s.group, s.computed, s.computed + n)]

    def used(self) -> dict[EncoderItem, int]:
        """The tokens of what sequences on the device have begun to read and of what the step touches."""
        sequences = [sequence for group in self.scheduler.running for sequence in group.live]
        begun = [image for sequence in sequences for image in sequence.begun if sequence.computed < image.stop]
        return {image.name: image.num_tokens for image in begun + self.planned()}

    def fits(self, group: "SlowGroup", start: int, stop: int) -> bool:
        """True if the step has room for these tokens, and need not wait for an image."""
        images = self.touched(group, start, stop)
        if self.scheduler.config.prepares_images:
            known = {*self.kept, *self.used(), *self.prepared}
            if any(image.name not in known for image in images):
                return False
        touched = {image.name: image.num_tokens for image in images}
        used = self.used() | touched
        new = {image.name: image.num_tokens for image in self.planned()} | touched
        new = {name: num_tokens for name, num_tokens in new.items() if name not in self.kept}
        return sum(used.values()) <= self.size and (len(new) <= 1 or sum(new.values()) <= self.budget)

    def cuts(self, group: "SlowGroup", stop: int) -> bool:
        """True if no chunk may end before token `stop`."""
        return self.are_whole and any(image.start < stop < image.stop for image in group.images)

    def reach(self, group: "SlowGroup", start: int, most: int, left: int = 0) -> int:
        """The most tokens after `start` that the step can compute, too. `left`: the tokens for an image that is not
        divided."""
        if not group.images or not most:
            return most
        least = next(n for n in itertools.count(1) if not self.cuts(group, start + n))
        if most < least <= left:
            most = least
        allowed = [n for n in range(1, most + 1) if not self.cuts(group, start + n)]
        return max([n for n in allowed if self.fits(group, start, start + n)], default=0)

    def write(self) -> tuple[list[EncoderItem], list[EncoderItem]]:
        """What the step encodes, and what is dropped."""
        used, encoded, dropped = self.used(), [], []
        for image in self.planned():
            if image.name not in self.kept:
                encoded.append(image.name)
            self.kept.pop(image.name, None)
            self.kept[image.name] = image.num_tokens  # the last now
        for sequence, num_tokens, _ in self.scheduler.plan:
            sequence.begun += self.touched(sequence.group, sequence.computed, sequence.computed + num_tokens)
        while sum(self.kept.values()) > self.size:
            dropped.append(next(name for name in self.kept if name not in used))
            del self.kept[dropped[-1]]
        return encoded, dropped

    def ahead(self, is_empty: bool) -> list[EncoderItem]:
        """After a step, the first four images that running sequences need next and that the worker does not keep. A
        step that is empty without them has none while others are in flight, or if the worker has prepared them."""
        sequences = [sequence for group in self.scheduler.running for sequence in group.live if sequence.is_known]
        needed = [image for s in sequences for image in [i for i in s.group.images if i.stop > s.computed][:1]]
        first = [*dict.fromkeys(image.name for image in needed if image.name not in self.kept)][:4]
        if is_empty and (self.scheduler.num_in_flight or self.prepared.issuperset(first)):
            return []
        self.told = first
        self.prepared &= {*first}  # the worker forgets the others
        return first

    def forked(self, parent: "SlowSequence", child: "SlowSequence") -> None:
        child.begun = [*parent.begun]
