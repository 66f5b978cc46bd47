"""Finds a worker's blocks by their tokens, including blocks that are only planned or expected.

A full block can be found as soon as the chunk that fills it is planned. A worker stores the keys and values of all rows
before any row attends to them, and does steps in order. A step copies blocks before it fills blocks. A sequence that
shares a block may therefore not be copied or swapped out in the step that fills the block.

A key is a SHA-256 chain over the block's tokens and all tokens before them. The chain's root separates caches: it holds
the server's secret, the tenant's salt and the adapter. With a collision or a guessable key, a client could read another
client's text. Hashing a block takes about 1 µs.

Several groups of layers share the keys: a key stands for as many tokens as the scheduler's block size, which is a
multiple of each group's block. A prefix is found if all groups have the blocks that later tokens attend to: groups with
a window have the last ones, and other groups have all.
"""

import hashlib
import itertools
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from scheduler_service.core.blocks.allocator import BlockAllocator
from scheduler_service.core.blocks.tables import NO_BLOCK, Pool, TableSizes
from scheduler_service.core.groups.encoder_input import EncoderInput
from scheduler_service.core.groups.sequence import EncoderSequence, Sequence, SequenceGroup


def root_key(*parts: bytes) -> bytes:
    """The root of a chain. Only equal parts give equal roots."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def root_behind(root: bytes, encoder_input: EncoderInput | None) -> bytes:
    return root if encoder_input is None else root_key(root, encoder_input.digest)


def encoder_keys(first: bytes, num_blocks: int) -> list[bytes]:
    """Keys of an encoder's blocks; each stands for the whole input, so the last block need not be full."""
    return [root_key(first, index.to_bytes(8, "little"), b"encoder") for index in range(num_blocks)]


def first_key(group: SequenceGroup) -> bytes:
    return key_of_adapter(root_behind(group.cache_root, group.encoder_input), group.adapter_id)


def key_of_adapter(root: bytes, adapter: str) -> bytes:
    return root_key(root, adapter.encode()) if adapter else root


def block_keys(first: bytes, token_ids: "array[int]", block_size: int) -> Iterator[bytes]:
    """The keys of the full blocks of these tokens."""
    key = first
    for end in range(block_size, len(token_ids) + 1, block_size):
        key = next_key(key, token_ids[end - block_size : end])
        yield key


def next_key(previous: bytes, token_ids: "array[int]") -> bytes:
    return hashlib.sha256(previous + token_ids.tobytes()).digest()


class SequenceKeys:
    """Computes the block keys of one worker's sequences; without prefix caching there are none."""

    def __init__(self, block_size: int, *, prefix_caching: bool) -> None:
        self._block_size = block_size
        self._prefix_caching = prefix_caching

    def leading(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The keys of the first `num_blocks` blocks, which must be full, and possibly of later blocks."""
        keys = sequence.block_keys
        if sequence.is_encoder and not keys:
            keys += encoder_keys(first_key(sequence.group), num_blocks)
        size = self._block_size
        for index in range(len(keys), num_blocks):
            tokens = sequence.tokens_between(index * size, (index + 1) * size)
            keys.append(next_key(keys[-1] if keys else first_key(sequence.group), tokens))
        return keys

    def cacheable(self, sequence: Sequence) -> list[bytes]:
        """The keys of all full blocks before the last token, which is computed for its logits. The list is empty if the
        hidden states of all tokens are needed."""
        num_blocks = self.num_cacheable(sequence)
        return self.leading(sequence, num_blocks)[:num_blocks]

    def num_cacheable(self, sequence: Sequence) -> int:
        if not self._prefix_caching or sequence.sampling.needs_all_states:
            return 0
        return (sequence.num_tokens - 1) // self._block_size

    def cacheable_of_encoder(self, encoder: EncoderSequence) -> list[bytes]:
        return self.leading(encoder, -(-encoder.num_prompt_tokens // self._block_size)) if self._prefix_caching else []

    def findable(self, leader: Sequence) -> list[bytes]:
        encoder = leader.group.encoder
        own = self.cacheable(leader)
        return own if encoder is None else [*self.cacheable_of_encoder(encoder), *own]


class Run(NamedTuple):
    end: int
    """First index whose key finds no block."""
    num_looked_up: int
    """Keys that were looked up or compared."""


class FoundRuns:
    """The runs of cached blocks that were found in one step, so that an equal prefix is not looked up again.

    If two prompts have the same key at one index, all earlier keys are equal, so bisection finds the common prefix.
    """

    def __init__(self, blocks: BlockAllocator) -> None:
        self._blocks = blocks
        self._num_lost = blocks.num_lost
        self._runs: dict[bytes, tuple[SequenceOf[bytes], int]] = {}

    def find(self, keys: SequenceOf[bytes], start: int, end: int) -> Run:
        if self._num_lost != self._blocks.num_lost:
            self._num_lost = self._blocks.num_lost
            self._runs.clear()
        if start >= end:
            return Run(start, 0)
        known, known_end = self._runs.get(keys[start], ((), start))
        common = range(start, min(end, known_end))
        begin = start + bisect_left(common, True, key=lambda place: keys[place] != known[place])
        stop = self._blocks.end_of_run(keys, begin, end)
        if stop > known_end:
            self._runs[keys[start]] = keys, stop
        return Run(stop, len(common).bit_length() + stop - begin + 1)


class PrefixLook(NamedTuple):
    first: int
    """Index of the first block that is not found."""
    awaited: bytes | None
    """Key of block `first` if a running sequence will compute it, or None."""
    num_looked_up: int


KEY_BYTES = 32
_NOTHING_EXPECTED = PrefixLook(0, None, 0)


class CachedPrefix(NamedTuple):
    num_tokens: int
    tables: list[list[int]]
    """A table for each group of layers; no later token attends to blocks `NO_BLOCK`."""
    blocks: SequenceOf[int]
    """The blocks in all tables."""


class PrefixCache:
    def __init__(
        self, device: Pool, host: Pool, sizes: SequenceOf[TableSizes], *, block_size: int, prefix_caching: bool
    ) -> None:
        self.keys = SequenceKeys(block_size, prefix_caching=prefix_caching)
        self._device, self._host = device, host
        self._block_size = block_size
        self._layers = [one.layers for one in sizes]
        self._has_windows = any(layers.window for layers in self._layers)
        self._is_plain = self._layers == [(block_size, 0)]
        # A key and a tag find a block of one group of layers. Without a tag, a key finds the first group's last block.
        self._tags = [
            [bytes([number, place]) for place in range(block_size // group.block_size)]
            for number, group in enumerate(self._layers)
        ]
        self._tags[0][-1] = b""
        self._is_on = prefix_caching

    # ---- changes of the cache

    def publish(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Publish the full blocks of a sequence's first tokens, whose steps must be planned. Returns the published
        blocks.

        The last block of an encoder's input counts as full. After a withdrawn block, no later block is published.
        """
        num_full, start = num_tokens // self._block_size, sequence.num_published_blocks
        if sequence.is_encoder:
            num_full = -(-num_tokens // self._block_size)
        if not self._is_on or num_full <= start:
            return []
        pool = self._device if sequence.id in self._device.tables else self._host
        if sequence.id not in pool.tables:
            return []
        keys = self.keys.leading(sequence, num_full)
        if start and self._is_withdrawn(sequence, start - 1, pool):
            self.unexpect(sequence, sequence.num_expected_blocks)
            return []
        published: list[int] = []
        root = b"" if start else first_key(sequence.group)
        for tables, tags in zip(pool.all_tables, self._tags, strict=True):
            if (table := tables.get(sequence.id)) is None:
                continue  # an encoder's input is only in the first group
            number = len(tags)
            for place, block in enumerate(table[start * number : num_full * number], start * number):
                if block != NO_BLOCK:
                    index = place // number
                    pool.blocks.publish(block, keys[index] + tags[place % number], keys[index - 1] if index else root)
                    published.append(block)
        self.unexpect(sequence, num_full)
        sequence.num_published_blocks = num_full
        return published

    def _is_withdrawn(self, sequence: Sequence, index: int, pool: Pool) -> bool:
        """Whether the block of a sequence's key `index` has lost its key. A block behind a window counts as kept."""
        block = pool.tables[sequence.id][(index + 1) * len(self._tags[0]) - 1]
        return block != NO_BLOCK and pool.blocks.key(block) is None

    def take_back(self, sequence: Sequence) -> None:
        """Remove the blocks of a planned chunk that will not be computed. No other sequence may hold them."""
        self.unexpect(sequence, sequence.num_expected_blocks)
        first, end = sequence.num_computed_tokens // self._block_size, sequence.num_published_blocks
        for layers, tables, tags in zip(self._layers, self._device.all_tables, self._tags, strict=True):
            begin = sequence.num_computed_tokens // layers.block_size
            for block in tables.get(sequence.id, ())[begin : end * len(tags)]:
                assert self._device.blocks.ref_count(block) == 1, "a sequence relies on a chunk that is taken back"
                self._device.blocks.withdraw(block)
        sequence.num_published_blocks = min(first, end)

    def expect(self, sequence: Sequence) -> None:
        """Mark the blocks of a running sequence's remaining known tokens as expected."""
        num_full, num_published = sequence.num_tokens // self._block_size, sequence.num_published_blocks
        start = max(num_published, sequence.num_expected_blocks)
        if self._is_on and not sequence.is_encoder and num_full > start:
            if num_published and self._is_withdrawn(sequence, num_published - 1, self._device):
                return  # after a withdrawn block, no block is published
            for key in self.keys.leading(sequence, num_full)[start:num_full]:
                self._device.blocks.expect(key)
            sequence.num_expected_blocks = num_full

    def unexpect(self, sequence: Sequence, end: int) -> None:
        """Stop expecting the first `end` blocks of a sequence, which are planned or will not be computed."""
        for key in sequence.block_keys[sequence.num_published_blocks : min(end, sequence.num_expected_blocks)]:
            self._device.blocks.unexpect(key)
        if end >= sequence.num_expected_blocks:
            sequence.num_expected_blocks = 0

    def withdraw(self, sequence: Sequence) -> None:
        """Remove a sequence's blocks, its encoder's blocks, and all that follow them in a chain: their contents cannot
        be trusted."""
        encoder = sequence.group.encoder
        ids = [sequence.id] if encoder is None else [sequence.id, encoder.id]
        unsound = sequence.block_keys[: sequence.num_published_blocks]  # also of blocks behind a window
        unsound += [] if encoder is None else [first_key(sequence.group)]
        for pool in (self._device, self._host):
            for block in itertools.chain(*map(pool.blocks_of, ids)):
                if (key := pool.blocks.key(block)) is not None:
                    pool.blocks.withdraw(block)
                    unsound.append(key[:KEY_BYTES])
        while unsound:
            key = unsound.pop()
            for blocks in (self._device.blocks, self._host.blocks):
                unsound += {child[:KEY_BYTES] for child in blocks.children(key)}
                for tag in itertools.chain(*self._tags):
                    if (found := blocks.find(key + tag)) is not None:
                        blocks.withdraw(found)

    def reset(self) -> int:
        """Remove every block; block tables keep their blocks.

        Returns how many device blocks lookups could find before the reset.
        """
        num_findable = self._device.blocks.num_findable
        for blocks in (self._device.blocks, self._host.blocks):
            blocks.withdraw_all()
        return num_findable

    # ---- lookups for waiting sequences

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens that a sequence without a table would find, including its encoder's input."""
        num_tokens = self.cached(sequence).num_tokens
        encoder = sequence.group.encoder
        if encoder is not None and self.cached_encoder_blocks(encoder):
            num_tokens += encoder.num_prompt_tokens
        return num_tokens

    def num_shared_tokens(self, sequence: Sequence) -> int:
        """`num_cached_tokens` plus the following tokens that running sequences will compute."""
        num_tokens = self.num_cached_tokens(sequence)
        if (look := self.look_up(sequence, 0, FoundRuns(self._device.blocks))).awaited is not None:
            num_tokens += (
                self._device.blocks.num_expected(self.keys.cacheable(sequence)[look.first :]) * self._block_size
            )
        return num_tokens

    def look_up(self, sequence: Sequence, start: int, runs: FoundRuns) -> PrefixLook:
        """Find the first block that is not cached. `start` is the number of leading blocks that an earlier lookup
        found.

        The keys are not copied, which would take 30 µs for 131,072 tokens.
        """
        if not self._device.blocks.num_expected_keys:
            return _NOTHING_EXPECTED
        end = self.keys.num_cacheable(sequence)
        keys = self.keys.leading(sequence, end)
        if start and self._device.blocks.find(keys[start - 1]) is None:
            start = 0
        first, num_looked_up = runs.find(keys, start, end)
        is_expected = first < end and self._device.blocks.is_expected(keys[first])
        return PrefixLook(first, keys[first] if is_expected else None, num_looked_up + 2)

    def has_encoded(self, group: SequenceGroup) -> bool:
        return group.encoder is not None and bool(self.cached_encoder_blocks(group.encoder))

    def cached(self, sequence: Sequence) -> CachedPrefix:
        """The longest prefix of a waiting sequence that is cached in all groups of layers."""
        keys, blocks = self.keys.cacheable(sequence), self._device.blocks
        if self._is_plain:
            run = blocks.find_run(keys)
            return CachedPrefix(len(run) * self._block_size, [run], run)
        end = len(keys)
        if self._has_windows and len(live := sequence.group.live) > 1:
            # Followers need the window before the first token that they compute themselves.
            first = min(sequence.num_prompt_tokens, *(one.num_tokens - 1 for one in live))
            end = min(end, first // self._block_size)
        for with_window in (False, True):  # without a window, a shorter prefix needs no other blocks
            while (missing := self._missing(keys, end, with_window)) is not None:
                end = missing
        tables: list[list[int]] = []
        for layers, tags in zip(self._layers, self._tags, strict=True):
            first = layers.first_needed(end * self._block_size)
            found = (blocks.find(keys[i // len(tags)] + tags[i % len(tags)]) for i in range(first, end * len(tags)))
            tables.append([NO_BLOCK] * first + [block for block in found if block is not None])
        found_blocks = [block for table in tables for block in table if block != NO_BLOCK]
        return CachedPrefix(end * self._block_size, tables, found_blocks)

    def _missing(self, keys: SequenceOf[bytes], end: int, with_window: bool) -> int | None:
        """The first key before `end` of which a group of layers, with or without a window, lacks a block that tokens
        after `end` attend to; None if none is lacking. A longer prefix than that key's would lack the block, too."""
        find = self._device.blocks.find
        for layers, tags in zip(self._layers, self._tags, strict=True):
            if bool(layers.window) == with_window:
                for place in range(layers.first_needed(end * self._block_size), end * len(tags)):
                    if find(keys[place // len(tags)] + tags[place % len(tags)]) is None:
                        return place // len(tags)
        return None

    def cached_encoder_blocks(self, encoder: EncoderSequence) -> list[int]:
        """All blocks of an encoder's input, or an empty list if any is not cached."""
        keys = self.keys.cacheable_of_encoder(encoder)
        blocks = self._device.blocks.find_run(keys)
        return blocks if len(blocks) == len(keys) else []
