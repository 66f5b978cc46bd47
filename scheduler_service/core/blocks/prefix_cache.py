"""Finds a worker's blocks by their tokens, including blocks that are only planned or expected.

A full block of known tokens can be found from the moment when the chunk that fills it is planned. In the step that
fills it, a block can be found safely, because a worker stores all rows' keys and values before any row attends to them.
In later steps, finding a planned block is safe because a worker does steps in order. A step copies blocks before it
fills blocks. A sequence that shares a block may therefore not be copied or swapped out in the step that fills the
block.

A running sequence's block is expected if no planned step computes it yet.
"""

import itertools
from typing import NamedTuple

from scheduler_service.core.blocks.found_runs import FoundRuns
from scheduler_service.core.blocks.pool import NO_BLOCK, Pool
from scheduler_service.core.blocks.prefix_key import SequenceKeys, first_key
from scheduler_service.core.blocks.sizes import TableSizes
from scheduler_service.core.groups.sequence import EncoderSequence, Sequence, SequenceGroup


class PrefixLook(NamedTuple):
    """The result of looking up a waiting sequence's blocks."""

    first: int
    """Index of the first block that is not found."""
    awaited: bytes | None
    """Key of the first block that is not found; None if no running sequence will compute this block."""
    num_looked_up: int
    """Block hashes that were looked up or compared."""


_NOTHING_EXPECTED = PrefixLook(0, None, 0)


class PrefixCache:
    """Publishes the blocks of sequences on the device and the host, and finds blocks on the device for waiting
    sequences."""

    def __init__(self, device: Pool, host: Pool, sizes: TableSizes, *, prefix_caching: bool) -> None:
        self.keys = SequenceKeys(sizes, prefix_caching=prefix_caching)
        self._device, self._host = device, host
        self._sizes = sizes
        self._is_on = prefix_caching

    # ---- changes of the cache

    def publish(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Publish the full blocks of a sequence's first tokens, on the device or, if the sequence is swapped out, on
        the host.

        The first `num_tokens` tokens must be known, and the steps that compute them must be planned. The last block of
        an encoder's input counts as full, because that input does not grow. If a block of the sequence was withdrawn,
        its later blocks are not published. Returns the published blocks.
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
        """Remove the blocks of a planned chunk that will not be computed from the prefix cache. No other sequence may
        hold the blocks of this chunk."""
        self.unexpect(sequence, sequence.num_expected_blocks)
        first, end = sequence.num_computed_tokens // self._sizes.block_size, sequence.num_published_blocks
        for block in self._device.tables[sequence.id][first:end]:
            assert self._device.blocks.ref_count(block) == 1, "a sequence relies on a chunk that is taken back"
            self._device.blocks.withdraw(block)
        sequence.num_published_blocks = min(first, end)

    def expect(self, sequence: Sequence) -> None:
        """Mark the blocks of a running sequence's remaining known tokens as expected, so that other groups can wait for
        them."""
        num_full, num_published = sequence.num_tokens // self._sizes.block_size, sequence.num_published_blocks
        start = max(num_published, sequence.num_expected_blocks)
        if self._is_on and not sequence.is_encoder and num_full > start:
            if num_published and self._device.blocks.key(self._device.tables[sequence.id][num_published - 1]) is None:
                return  # after a withdrawn block, no block is published
            for key in self.keys.leading(sequence, num_full)[start:num_full]:
                self._device.blocks.expect(key)
            sequence.num_expected_blocks = num_full

    def unexpect(self, sequence: Sequence, end: int) -> None:
        """Stop expecting the first `end` blocks of a sequence, because these blocks are planned or will not be
        computed."""
        for key in sequence.block_keys[sequence.num_published_blocks : min(end, sequence.num_expected_blocks)]:
            self._device.blocks.unexpect(key)
        if end >= sequence.num_expected_blocks:
            sequence.num_expected_blocks = 0

    def withdraw(self, sequence: Sequence) -> None:
        """Remove the sequence's blocks from the prefix cache, because their contents cannot be trusted.

        The blocks of its encoder's input are removed too, and all cached blocks whose keys follow a removed key in a
        chain.
        """
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
        """Remove every block from the prefix cache, on the device and on the host; block tables keep their blocks.

        Returns the number of device blocks that could be found before the reset. If a sequence in flight publishes a
        block later, the block is found only after the blocks before it were computed again.
        """
        num_findable = self._device.blocks.num_findable
        for blocks in (self._device.blocks, self._host.blocks):
            blocks.withdraw_all()
        return num_findable

    # ---- lookups for waiting sequences

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Number of tokens that a sequence without a table would find in the cache, including its encoder's input."""
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
        """Find the first block of a waiting sequence that is not cached, and whether the block is expected.

        `start` is the number of leading blocks that an earlier lookup found. If the last of these leading blocks is no
        longer cached, all blocks are looked up again. `runs` contains the runs of blocks that were found for other
        sequences in this step. Copying the keys of a prompt of 131,072 tokens would take 30 µs, so the keys are not
        copied.
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
        """Whether the whole encoder input of a waiting group is in the cache."""
        return group.encoder is not None and bool(self.cached_encoder_blocks(group.encoder))

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """The blocks of a sequence's longest cached prefix."""
        return self._device.blocks.find_run(self.keys.cacheable(sequence))

    def cached_encoder_blocks(self, encoder: EncoderSequence) -> list[int]:
        """All blocks of an encoder's input; an empty list if any block is not cached."""
        keys = self.keys.cacheable_of_encoder(encoder)
        blocks = self._device.blocks.find_run(keys)
        return blocks if len(blocks) == len(keys) else []
