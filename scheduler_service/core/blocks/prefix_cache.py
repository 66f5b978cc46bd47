"""Finds a worker's blocks by their tokens, including blocks that are only planned or expected.

A full block can be found as soon as the chunk that fills it is planned. A worker stores the keys and values of all rows
before any row attends to them, and does steps in order. A step copies blocks before it fills blocks. A sequence that
shares a block may therefore not be copied or swapped out in the step that fills the block.

Several groups of layers share the keys: a key stands for as many tokens as the scheduler's block size, which is a
multiple of each group's block. A prefix is found if all groups have the blocks that later tokens need: groups with a
window have the last ones, groups with states have the states after the prefix, and other groups have all.
"""

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from scheduler_service.core.blocks.found_runs import FoundRuns
from scheduler_service.core.blocks.keys import SequenceKeys, first_key
from scheduler_service.core.blocks.tables import NO_BLOCK, Pool, TableSizes
from scheduler_service.core.config import LayerGroup
from scheduler_service.core.groups.sequence import EncoderSequence, Sequence, SequenceGroup


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
    num_shared_tokens: int
    """Length of the prefix that layers without states would find."""
    tables: list[list[int]]
    """A table for each group of layers; no later token attends to blocks `NO_BLOCK`."""
    blocks: SequenceOf[int]
    """The blocks in all tables."""


_TaggedGroup = tuple[LayerGroup, list[bytes]]
"""A group of layers, and the tags of a key's blocks."""
Find = Callable[[bytes], int | None]
"""Finds the block of a key and a tag."""


class PrefixCache:
    def __init__(
        self, device: Pool, host: Pool, sizes: SequenceOf[TableSizes], *, block_size: int, prefix_caching: bool
    ) -> None:
        self.keys = SequenceKeys(block_size, prefix_caching=prefix_caching)
        self._device, self._host = device, host
        self.block_size = block_size
        self._layers = [one.layers for one in sizes]
        self._has_windows = any(layers.window for layers in self._layers)
        self._has_states = any(layers.has_states for layers in self._layers)
        self._is_plain = self._layers == [LayerGroup(block_size)]
        # A key and a tag find a block of one group of layers. Without a tag, a key finds the first group's last block.
        self._tags = [
            [bytes([number, place]) for place in range(block_size // (group.block_size or block_size))]
            for number, group in enumerate(self._layers)
        ]
        self._state_places: dict[bytes, int] = {}  # places in chains of keys with states, perhaps evicted
        self._stale: set[int] = set()  # ids of sequences that began before the last reset
        self._tags[0][-1] = b""
        tagged = [*zip(self._layers, self._tags, strict=True)]
        self._whole = [one for one in tagged if not (one[0].window or one[0].has_states)]
        self._recent = [one for one in tagged if one[0].window]
        self._states = [one for one in tagged if one[0].has_states]
        self._is_on = prefix_caching

    # ---- changes of the cache

    def publish(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Publish the full blocks of a sequence's first tokens, whose steps must be planned. Returns the published
        blocks.

        The last block of an encoder's input counts as full. After a withdrawn block, no later block is published.
        """
        num_full, start = num_tokens // self.block_size, sequence.num_published_blocks
        if sequence.is_encoder:
            num_full = -(-num_tokens // self.block_size)
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
        for layers, tables, tags in zip(self._layers, pool.all_tables, self._tags, strict=True):
            if layers.has_states or (table := tables.get(sequence.id)) is None:
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
        """Whether a sequence may publish no more blocks. Its block number `index` has lost its key, or the cache was
        reset after the sequence began. A block behind a window counts as a block with its key."""
        if sequence.id in self._stale:
            return True
        if self._layers[0].has_states:
            return False
        block = pool.tables[sequence.id][(index + 1) * len(self._tags[0]) - 1]
        return block != NO_BLOCK and pool.blocks.key(block) is None

    def take_back(self, sequence: Sequence) -> None:
        """Remove the blocks of a planned chunk that will not be computed. No other sequence may hold them."""
        self.unexpect(sequence, sequence.num_expected_blocks)
        first, end = sequence.num_computed_tokens // self.block_size, sequence.num_published_blocks
        for layers, tables, tags in zip(self._layers, self._device.all_tables, self._tags, strict=True):
            if layers.has_states:
                continue
            begin = sequence.num_computed_tokens // layers.block_size
            for block in tables.get(sequence.id, ())[begin : end * len(tags)]:
                assert self._device.blocks.ref_count(block) == 1, "a sequence relies on a chunk that is taken back"
                self._device.blocks.withdraw(block)
        sequence.num_published_blocks = min(first, end)

    def expect(self, sequence: Sequence) -> None:
        """Mark the blocks of a running sequence's remaining known tokens as expected."""
        num_full, num_published = sequence.num_tokens // self.block_size, sequence.num_published_blocks
        start = max(num_published, sequence.num_expected_blocks)
        if self._is_on and not (sequence.is_encoder or self._has_states) and num_full > start:
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
        self.withdraw_chains(unsound)

    def withdraw_chains(self, keys: Iterable[bytes]) -> None:
        """Remove the blocks with these keys, and all that follow them in a chain."""
        unsound = [*keys]
        while unsound:
            key = unsound.pop()
            for blocks in (self._device.blocks, self._host.blocks):
                unsound += {child[:KEY_BYTES] for child in blocks.children(key)}
                for tag in itertools.chain(*self._tags):
                    if (found := blocks.find(key + tag)) is not None:
                        blocks.withdraw(found)

    def publish_states(self, sequence: Sequence, num_tokens: int, blocks: SequenceOf[int]) -> None:
        """Publish a block of each group with states. The blocks have the states after a sequence's first `num_tokens`
        tokens. The worker must have answered the steps of these tokens."""
        index = num_tokens // self.block_size - 1
        keys = self.keys.leading(sequence, index + 1)
        pool = self._device if sequence.id in self._device.tables else self._host
        if sequence.id in pool.tables and self._is_withdrawn(sequence, index, pool):
            return
        parent = keys[index - 1] if index else first_key(sequence.group)
        for block, (_, (tag,)) in zip(blocks, self._states, strict=True):
            self._device.blocks.publish(block, keys[index] + tag, parent)
        self._state_places[keys[index]] = index
        if len(self._state_places) > 2 * self._device.blocks.num_blocks:
            self._forget_evicted_states()

    def _forget_evicted_states(self) -> None:
        find, (_, (tag,)) = self._device.blocks.find, self._states[0]
        self._state_places = {key: place for key, place in self._state_places.items() if find(key + tag) is not None}

    def free_states(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """The free cached blocks with the states after a sequence's first tokens."""
        index = num_tokens // self.block_size - 1
        if not self._is_on or not 0 <= index < len(sequence.block_keys):
            return []
        found = (self._device.blocks.find(sequence.block_keys[index] + tag) for _, (tag,) in self._states)
        return [block for block in found if block is not None and not self._device.blocks.ref_count(block)]

    def forked(self, parent: Sequence, child: Sequence) -> None:
        if parent.id in self._stale:
            self._stale.add(child.id)

    def leave(self, sequence: Sequence) -> None:
        self._stale.discard(sequence.id)

    def reset(self) -> int:
        """Remove every block; block tables keep their blocks.

        Returns how many device blocks lookups could find before the reset.
        """
        for pool in (self._device, self._host):
            self._stale.update(pool.tables)
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
                self._device.blocks.num_expected(self.keys.cacheable(sequence)[look.first :]) * self.block_size
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
            return CachedPrefix(num_tokens := len(run) * self.block_size, num_tokens, [run], run)
        end, shared = self._longest_cached(sequence, keys, blocks.find)
        tables: list[list[int]] = []
        for layers, tags in zip(self._layers, self._tags, strict=True):
            if layers.has_states:
                found = (blocks.find(key + tags[0]) for key in keys[max(0, end - 1) : end])
                tables.append([block for block in found if block is not None])
                continue
            first = layers.first_needed(end * self.block_size)
            found = (blocks.find(keys[i // len(tags)] + tags[i % len(tags)]) for i in range(first, end * len(tags)))
            tables.append([NO_BLOCK] * first + [block for block in found if block is not None])
        found_blocks = [block for table in tables for block in table if block != NO_BLOCK]
        return CachedPrefix(end * self.block_size, shared * self.block_size, tables, found_blocks)

    def num_kept_tokens(self, sequence: Sequence, find: Find) -> int:
        """Length in tokens of the prefix whose blocks with keys and values `find` finds. Cached states count as
        kept: `StateBlocks.outlive` lets them be evicted after the sequence's own blocks."""
        keys = self.keys.cacheable(sequence)
        if self._is_plain:
            return sum(1 for _ in itertools.takewhile(lambda key: find(key) is not None, keys)) * self.block_size
        return self._longest_cached(sequence, keys, find)[0] * self.block_size

    def _longest_cached(self, sequence: Sequence, keys: SequenceOf[bytes], find: Find) -> tuple[int, int]:
        """The number of keys in the longest cached prefix: of all groups of layers, and of the groups without
        states."""
        end = len(keys)
        if self._has_states and len(sequence.group.live) > 1:
            # A chunk of the leader ends before the last prompt token, and then its states are forked.
            end = min(end, max(0, sequence.num_prompt_tokens - 2) // self.block_size)
        elif self._has_windows and len(live := sequence.group.live) > 1:
            # Followers need the window before the first token that they compute themselves.
            first = min(sequence.num_prompt_tokens, *(one.num_tokens - 1 for one in live))
            end = min(end, first // self.block_size)
        # Without windows, a shorter prefix needs no other blocks.
        end = shared = self._longest(keys, self._longest(keys, end, self._whole, find), self._recent, find)
        while self._has_states:
            with_states = self.last_states(keys, end)
            if (end := self._longest(keys, with_states, self._recent, find)) == with_states:
                break
        return end, shared

    def last_states(self, keys: SequenceOf[bytes], end: int) -> int:
        """The largest number of keys, at most `end`, after which states are cached."""
        find = self._device.blocks.find

        def are_found(place: int) -> bool:
            return all(find(keys[place] + tag) is not None for _, (tag,) in self._states)

        if len(self._state_places) > end:
            return next((place + 1 for place in range(end - 1, -1, -1) if are_found(place)), 0)
        places = (place for key, place in self._state_places.items() if place < end and keys[place] == key)
        return max((place + 1 for place in places if are_found(place)), default=0)

    def _longest(self, keys: SequenceOf[bytes], end: int, groups: SequenceOf[_TaggedGroup], find: Find) -> int:
        """The largest number of keys, at most `end`, after which tokens find all blocks that they need in `groups`."""
        while (missing := self._missing(keys, end, groups, find)) is not None:
            end = missing
        return end

    def _missing(self, keys: SequenceOf[bytes], end: int, groups: SequenceOf[_TaggedGroup], find: Find) -> int | None:
        """The first key before `end` of which a group of layers lacks a block that tokens after `end` need; None if
        none is lacking. A longer prefix than that key's would lack the block, too."""
        for layers, tags in groups:
            for place in range(layers.first_needed(end * self.block_size), end * len(tags)):
                if find(keys[place // len(tags)] + tags[place % len(tags)]) is None:
                    return place // len(tags)
        return None

    def cached_encoder_blocks(self, encoder: EncoderSequence) -> list[int]:
        """All blocks of an encoder's input, or an empty list if any is not cached."""
        keys = self.keys.cacheable_of_encoder(encoder)
        blocks = self._device.blocks.find_run(keys)
        return blocks if len(blocks) == len(keys) else []
