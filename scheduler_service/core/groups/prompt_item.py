"""Parts of a prompt that are not text: embeddings that the client gives, and images.

An item takes the place of `num_embeddings` tokens. Tokens of given embeddings have the id `PLACEHOLDER`; tokens of
images have the ids that the model's processor writes. Block keys contain the digests of items, so equal ids never find
the blocks of other items. A worker receives an item's data again only after it has dropped the data. It keeps the data
of its sequences' items, and up to `KEPT_BYTES` of others. The parts of an image share its data.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

PLACEHOLDER = 0
KEPT_BYTES = 64 << 20
"""Bytes of items without a sequence that a worker keeps for later requests."""


class ImagePart(NamedTuple):
    """An image, or a part of one, which the worker encodes on its own. Sizes are those of the whole image in pixels."""

    width: int
    height: int
    part: int = 0
    """Index in the order of the prompt."""


class EncoderItem(NamedTuple):
    """Names an image, or a part of one, in a worker's encoder cache."""

    digest: bytes
    part: int


class PromptItem(NamedTuple):
    """Equal items have equal digests. A replayed request has no `data`, only `num_bytes`."""

    digest: bytes
    """SHA-256 of the item's kind, type, shape and content; of an image, of its file."""
    start: int
    """Index of the first token that the item replaces."""
    num_embeddings: int
    num_bytes: int
    data: bytes = b""
    image: ImagePart | None = None

    @property
    def stop(self) -> int:
        return self.start + self.num_embeddings

    @property
    def part(self) -> int:
        return self.image.part if self.image is not None else 0

    @property
    def encoder_item(self) -> EncoderItem:
        return EncoderItem(self.digest, self.part)


Items = Sequence[PromptItem]
"""The items of a prompt, in its order."""

_START, _STOP = attrgetter("start"), attrgetter("stop")


def key_of_items(items: Items, start: int, stop: int) -> bytes:
    """The part of a block's key for items that begin at tokens [start, stop). The keys of later blocks depend on this
    key, so they do not name the items again."""
    key = b""
    for place in range(bisect_left(items, start, key=_START), len(items)):
        item = items[place]
        if item.start >= stop:
            break
        key += item.digest + item.start.to_bytes(4, "little") + item.part.to_bytes(4, "little")
    return key


def items_between(items: Items, start: int, stop: int) -> Iterator[PromptItem]:
    """The items that have any of the tokens [start, stop)."""
    for place in range(bisect_right(items, start, key=_STOP), len(items)):
        if items[place].start >= stop:
            return
        yield items[place]


def without_cut(items: Items, start: int, num_tokens: int, most: int) -> int:
    """Tokens of a chunk, `num_tokens` if possible, that does not end inside an item. A chunk that would end inside its
    first item gets the whole item if that makes at most `most` tokens, or else nothing."""
    stop = start + num_tokens
    cut = next(items_between(items, stop, stop + 1), None)
    if cut is None or cut.start == stop:
        return num_tokens
    if cut.start > start:
        return cut.start - start
    return cut.stop - start if cut.stop - start <= most else 0


def data_bytes(items: Items) -> int:
    """Bytes of the data of different items, as a worker receives them."""
    return sum({item.digest: item.num_bytes for item in items}.values())


class WorkerItems:
    """The items that one worker has. Items without a group are kept, and the least recently used are dropped first."""

    def __init__(self, most_kept: int = KEPT_BYTES) -> None:
        self._most_kept = most_kept
        self._users: Counter[bytes] = Counter()
        self._held: dict[object, dict[bytes, int]] = {}  # the digests and bytes of each group's items
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # without a group, the least recently used first
        self._num_kept_bytes = 0
        self._dropped: list[bytes] = []

    def hold(self, group: object, items: Items) -> frozenset[bytes]:
        """Keep items for a group until `release`. Returns the digests of items that the worker does not have."""
        held, missing = self._held.setdefault(group, {}), set()
        for item in items:
            digest = item.digest
            if digest in held:
                continue
            held[digest] = item.num_bytes
            if digest in self._kept:
                self._num_kept_bytes -= self._kept.pop(digest)
            elif not self._users[digest]:
                missing.add(digest)
            self._users[digest] += 1
        return frozenset(missing)

    def release(self, group: object) -> None:
        """Drop items for which no group and no room is left."""
        for digest, num_bytes in self._held.pop(group, {}).items():
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]
                self._kept[digest] = num_bytes
                self._num_kept_bytes += num_bytes
        while self._num_kept_bytes > self._most_kept:
            digest, num_bytes = self._kept.popitem(last=False)
            self._num_kept_bytes -= num_bytes
            self._dropped.append(digest)

    def take_dropped(self) -> list[bytes]:
        """Digests to be dropped by the worker before it receives further items; each is returned once."""
        dropped, self._dropped = self._dropped, []
        return dropped
