"""Finds a worker's blocks by their tokens, including blocks that are only planned or expected.

A full block can be found as soon as the chunk that fills it is planned. A worker stores the keys and values of all rows
before any row attends to them, and does steps in order. A step copies blocks before it fills blocks. A sequence that
shares a block may therefore not be copied or swapped out in the step that fills the block.

A key is a SHA-256 chain over the block's tokens and all tokens before them. The chain's root separates caches: it holds
the server's secret, the tenant's salt and the adapter. With a collision or a guessable key, a client could read another
client's text. Hashing a block takes about 1 µs.
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

    def __init__(self, sizes: TableSizes, *, prefix_caching: bool) -> None:
        self._sizes = sizes
        self._prefix_caching = prefix_caching

    def leading(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The keys of the first `num_blocks` blocks, which must be full, and possibly of later blocks."""
        keys = sequence.block_keys
        if sequence.is_encoder and not keys:
            keys += encoder_keys(first_key(sequence.group), num_blocks)
        size = self._sizes.block_size
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
        return (sequence.num_tokens - 1) // self._sizes.block_size

    def cacheable_of_encoder(self, encoder: EncoderSequence) -> list[bytes]:
        return self.leading(encoder, self._sizes.blocks_of(encoder.num_prompt_tokens)) if self._prefix_caching else []

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


_NOTHING_EXPECTED = PrefixLook(0, None, 0)


class PrefixCache:
    def __init__(self, device: Pool, host: Pool, sizes: TableSizes, *, prefix_caching: bool) -> None:
        self.keys = SequenceKeys(sizes, prefix_caching=prefix_caching)
        self._device, self._host = device, host
        self._sizes = sizes
        self._is_on = prefix_caching

    # ---- changes of the cache

    def publish(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Publish the full blocks of a sequence's first tokens, whose steps must be planned. Returns the published
        blocks.

        The last block of an encoder's input counts as full. After a withdrawn block, no later block is published.
        """
        num_full, start = num_tokens // self._sizes.block_size, sequence.num_published_blocks
        if sequence.is_encoder:
            num_full = self._sizes.blocks_of(num_tokens)
        if not self._is_on or num_full <= start:
            return []
        blocks, table = self._device.blocks, self._device.tables.get(sequence.id)
        if table is None:
            blocks, table = self._host.blocks, self._host.tables.get(sequence.id)
        if table is None:
            return []
        keys = self.keys.leading(sequence, num_full)
        if start and blocks.key(table[start - 1]) is None:
            self.unexpect(sequence, sequence.num_expected_blocks)
            return []
        parent = keys[start - 1] if start else first_key(sequence.group)
        for index in range(start, num_full):
            blocks.publish(table[index], keys[index], parent)
            parent = keys[index]
        self.unexpect(sequence, num_full)
        sequence.num_published_blocks = num_full
        return table[start:num_full]

    def take_back(self, sequence: Sequence) -> None:
        """Remove the blocks of a planned chunk that will not be computed. No other sequence may hold them."""
        self.unexpect(sequence, sequence.num_expected_blocks)
        first, end = sequence.num_computed_tokens // self._sizes.block_size, sequence.num_published_blocks
        for block in self._device.tables[sequence.id][first:end]:
            assert self._device.blocks.ref_count(block) == 1, "a sequence relies on a chunk that is taken back"
            self._device.blocks.withdraw(block)
        sequence.num_published_blocks = min(first, end)

    def expect(self, sequence: Sequence) -> None:
        """Mark the blocks of a running sequence's remaining known tokens as expected."""
        num_full, num_published = sequence.num_tokens // self._sizes.block_size, sequence.num_published_blocks
        start = max(num_published, sequence.num_expected_blocks)
        if self._is_on and not sequence.is_encoder and num_full > start:
            if num_published and self._device.blocks.key(self._device.tables[sequence.id][num_published - 1]) is None:
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
        unsound = [] if encoder is None else [first_key(sequence.group)]
        for pool in (self._device, self._host):
            for block in itertools.chain(*(pool.tables.get(id_, ()) for id_ in ids)):
                if block != NO_BLOCK and (key := pool.blocks.key(block)) is not None:
                    pool.blocks.withdraw(block)
                    unsound.append(key)
        while unsound:
            key = unsound.pop()
            for blocks in (self._device.blocks, self._host.blocks):
                unsound += blocks.children(key)
                if (found := blocks.find(key)) is not None:
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
        num_tokens = len(self.cached_blocks(sequence)) * self._sizes.block_size
        encoder = sequence.group.encoder
        if encoder is not None and self.cached_encoder_blocks(encoder):
            num_tokens += encoder.num_prompt_tokens
        return num_tokens

    def num_shared_tokens(self, sequence: Sequence) -> int:
        """`num_cached_tokens` plus the following tokens that running sequences will compute."""
        num_tokens = self.num_cached_tokens(sequence)
        if (look := self.look_up(sequence, 0, FoundRuns(self._device.blocks))).awaited is not None:
            num_tokens += (
                self._device.blocks.num_expected(self.keys.cacheable(sequence)[look.first :]) * self._sizes.block_size
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

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        return self._device.blocks.find_run(self.keys.cacheable(sequence))

    def cached_encoder_blocks(self, encoder: EncoderSequence) -> list[int]:
        """All blocks of an encoder's input, or an empty list if any is not cached."""
        keys = self.keys.cacheable_of_encoder(encoder)
        blocks = self._device.blocks.find_run(keys)
        return blocks if len(blocks) == len(keys) else []
