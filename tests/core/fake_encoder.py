"""A worker's encoder cache without an encoder. It checks that each step has the images that its chunks need, encodes
nothing without need or twice, and never exceeds the cache or the budget."""

from collections.abc import Collection, Iterable

from scheduler_service.core import EncoderItem, PromptItem, SchedulerConfig, SchedulerOutput
from scheduler_service.core.groups.prompt_item import Items, items_between


class FakeEncoder:
    """`failing`: digests of images that cannot be decoded. They are held until they are dropped."""

    def __init__(self, config: SchedulerConfig, failing: Collection[bytes] = ()) -> None:
        self._config = config
        self.failing = failing
        self.held: dict[EncoderItem, int] = {}
        self.num_encoded: int = 0

    def encode(
        self, output: SchedulerOutput, chunks: Iterable[tuple[Items, int, int]], files: Collection[bytes]
    ) -> list[EncoderItem]:
        """`chunks`: for each, the prompt's items, the first token and the number of tokens. `files`: the digests of
        items that the worker has. Returns the images that could not be decoded."""
        for name in output.dropped_embeddings:
            del self.held[name]
        needed: dict[EncoderItem, PromptItem] = {}
        for items, start, num_tokens in chunks:
            touched = [*items_between(items, start, stop := start + num_tokens)]
            if self._config.images_attend_both_ways:
                assert all(item.image is None or item.stop <= stop for item in touched), "a chunk divides an image"
            needed |= {item.encoder_item: item for item in touched if item.image is not None}
        new = output.items_to_encode
        assert len(set(new)) == len(new), "an image is encoded twice"
        assert self.held.keys().isdisjoint(new), "an image is encoded again while it is held"
        assert needed.keys() >= set(new), "an image is encoded before a chunk needs it"
        assert {name.digest for name in new} <= set(files), "an image is encoded whose file was not sent"
        sizes = {name: needed[name].num_embeddings for name in new}
        assert len(new) <= 1 or sum(sizes.values()) <= self._config.encoder_budget
        self.held |= sizes
        assert sum(self.held.values()) <= self._config.encoder_cache_size
        assert needed.keys() <= self.held.keys(), "a chunk needs an image that is not encoded"
        self.num_encoded += len(new)
        return [name for name in new if name.digest in self.failing]
