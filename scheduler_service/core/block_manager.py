"""Block tables: which blocks hold the keys and values of each sequence, in the order of positions.

A table covers at least the computed tokens of its sequence. A block may stand in several tables while nobody writes
to it; whoever writes to a shared block gets a copy first (copy on write). A sequence that is swapped out has a table of
host blocks instead; what its group shared stays shared there.

With a sliding window a table's leading entries become NO_BLOCK as soon as no token to come attends to them.
"""

import enum
from collections import Counter
from collections.abc import Iterable

from scheduler_service.core.block_allocator import BlockAllocator
from scheduler_service.core.prefix_directory import PrefixDirectory
from scheduler_service.core.prefix_key import next_key
from scheduler_service.core.sequence import Sequence, SequenceGroup

NO_BLOCK = -1
"""Stands in a table where a block was let go of."""


class AllocStatus(enum.Enum):
    """Whether a waiting group's blocks can be had: now, once others finish, or not even with the whole pool."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class BlockManager:
    """Owns the device and host blocks of one worker and every sequence's table of them."""

    def __init__(
        self,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int = 0,
        watermark: float = 0.0,
        *,
        prefix_caching: bool = False,
        num_lookahead_slots: int = 0,
        sliding_window: int = 0,
        max_blocks_per_sequence: int | None = None,
        directory: PrefixDirectory | None = None,
        bit: int = 1,
    ) -> None:
        self.num_lookahead_slots = num_lookahead_slots
        self.sliding_window = sliding_window
        self.max_blocks_per_sequence = max_blocks_per_sequence or num_device_blocks
        self.block_size = block_size
        self.device = BlockAllocator(num_device_blocks, directory, bit)
        self.host = BlockAllocator(num_host_blocks)
        self.num_watermark_blocks = int(watermark * num_device_blocks)
        self.prefix_caching = prefix_caching
        self.tables: dict[int, list[int]] = {}
        self.host_tables: dict[int, list[int]] = {}

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _num_blocks_ahead(self, num_tokens: int) -> int:
        """Entries of a table with room for so many tokens and what may follow them."""
        return self.num_blocks(num_tokens + self.num_lookahead_slots)

    def num_table_entries(self, sequence: Sequence, num_tokens: int) -> int:
        """Entries of a table on the device, once it has room for so many tokens past the computed ones."""
        num_ahead = self._num_blocks_ahead(sequence.num_computed_tokens + num_tokens)
        return max(num_ahead, len(self.tables[sequence.id]))

    def _num_first_blocks(self, sequence: Sequence) -> int:
        """Blocks that a sequence without any is given: for all its tokens, or the most that it ever holds."""
        num_blocks = self._num_blocks_ahead(len(sequence.token_ids))
        return min(num_blocks, self.max_blocks_per_sequence) if self.sliding_window else num_blocks

    def num_blocks_of(self, group: SequenceGroup) -> int:
        """Blocks that the group needs to reach the state it is in, its prompt's full blocks shared."""
        leader, *followers = group.live
        needed = self._num_first_blocks(leader)
        shared = min(leader.num_prompt_tokens // self.block_size, needed)
        return needed + sum(self._num_first_blocks(follower) - shared for follower in followers)

    def never_fits(self, group: SequenceGroup) -> bool:
        """Whether a waiting group needs more than the whole pool."""
        return self.num_blocks_of(group) > self.device.num_blocks

    def can_allocate(
        self, group: SequenceGroup, *, leave_watermark: bool, without: Iterable[SequenceGroup] = ()
    ) -> AllocStatus:
        """Whether a waiting group fits, once the running groups that it would be `without` have let go of their blocks.

        `leave_watermark` keeps blocks free for those that go on running.
        """
        if self.never_fits(group):
            return AllocStatus.NEVER
        leaving = Counter(block for other in without for s in other.live for block in self.tables.get(s.id, ()))
        del leaving[NO_BLOCK]
        num_free = self.device.num_free + sum(self.device.ref_count(b) == n for b, n in leaving.items())
        # A cached block that somebody goes on holding costs nothing.
        needed = self.num_blocks_of(group)
        needed -= sum(self.device.ref_count(block) > leaving[block] for block in self._cached_blocks(group.live[0]))
        reserve = self.num_watermark_blocks if leave_watermark else 0
        return AllocStatus.OK if needed + reserve <= num_free else AllocStatus.LATER

    def allocate(self, leader: Sequence) -> None:
        """Give a sequence without a table its first blocks, cached ones before others: those are computed."""
        assert leader.id not in self.tables
        table = self._cached_blocks(leader)
        for block in table:
            self.device.share(block)
        leader.num_computed_tokens = leader.num_stored_tokens = len(table) * self.block_size
        leader.num_published_blocks = len(table)
        table.extend(self.device.allocate() for _ in range(self._num_first_blocks(leader) - len(table)))
        self.tables[leader.id] = table
        leader.num_slots = len(table) * self.block_size - self.num_lookahead_slots

    def publish(self, sequence: Sequence) -> None:
        """Make the full blocks of a sequence's stored tokens findable, if it has blocks on the device."""
        num_full = sequence.num_stored_tokens // self.block_size
        if self.prefix_caching and num_full > sequence.num_published_blocks and sequence.id in self.tables:
            table, keys = self.tables[sequence.id], self._keys(sequence, num_full)
            for index in range(sequence.num_published_blocks, num_full):
                self.device.publish(table[index], keys[index])
            sequence.num_published_blocks = num_full

    def withdraw(self, sequence: Sequence) -> None:
        """Take the sequence's blocks out of the prefix cache, because what they hold is not sound."""
        for block in self.tables.get(sequence.id, ()):
            self.device.withdraw(block)

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens that a sequence without a table would find computed."""
        return len(self._cached_blocks(sequence)) * self.block_size

    def cacheable_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of the blocks that a sequence could find computed: all full ones short of the last token, because that
        one has to be computed for its logits.

        A prompt whose log-probabilities were asked for has to be computed whole.
        """
        if not self.prefix_caching or sequence.sampling.prompt_logprobs is not None:
            return []
        num_full = (len(sequence.token_ids) - 1) // self.block_size
        return self._keys(sequence, num_full)[:num_full]

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """The longest cached prefix."""
        blocks: list[int] = []
        for key in self.cacheable_keys(sequence):
            block = self.device.find(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _keys(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Keys of at least the first `num_blocks` blocks, which must be full; computed once."""
        keys = sequence.block_keys
        for index in range(len(keys), num_blocks):
            tokens = sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]
            keys.append(next_key(keys[-1] if keys else sequence.group.first_key, tokens))
        return keys

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let a sequence without a table go on from the parent's first `num_tokens` tokens, and share their blocks."""
        assert child.id not in self.tables
        blocks = self.tables[parent.id][: self.num_blocks(num_tokens)]
        for block in blocks:
            if block != NO_BLOCK:
                self.device.share(block)
        self.tables[child.id] = blocks
        child.forked_from = parent
        child.num_computed_tokens = child.num_stored_tokens = num_tokens
        child.num_slots = len(blocks) * self.block_size - self.num_lookahead_slots
        child.num_published_blocks = min(parent.num_published_blocks, num_tokens // self.block_size)

    def release_behind_window(self, sequence: Sequence) -> None:
        """Let go of the blocks that no token to come attends to; nothing happens without a sliding window."""
        if self.sliding_window and (table := self.tables.get(sequence.id)):
            end = max(0, sequence.num_computed_tokens - self.sliding_window + 1) // self.block_size
            for index in range(end - 1, -1, -1):
                if table[index] == NO_BLOCK:
                    break  # and so are those before it
                self.device.free(table[index])
                table[index] = NO_BLOCK

    def can_append_slots(self, chunks: Iterable[tuple[Sequence, int]]) -> bool:
        """Whether these sequences can all have room for this many tokens past their computed ones."""
        return self._num_new_blocks(chunks, self.tables, self.device) <= self.device.num_free

    def append_slots(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Make room for `num_tokens` tokens past the computed ones, in blocks that nobody else holds.

        Returns the blocks to copy, as pairs of source and destination.
        """
        table = self.tables[sequence.id]
        first = sequence.num_computed_tokens // self.block_size
        end = self._num_blocks_ahead(sequence.num_computed_tokens + num_tokens)
        copies: list[tuple[int, int]] = []
        for index in range(first, min(end, len(table))):
            block = table[index]
            if self.device.ref_count(block) > 1:
                table[index] = self.device.allocate()
                self.device.free(block)
                copies.append((block, table[index]))
                sequence.num_known_blocks = min(sequence.num_known_blocks, index)
            else:
                # A fork may write, after its own tokens, to a block that was published with its parent's.
                self.device.withdraw(block)
        table.extend(self.device.allocate() for _ in range(end - len(table)))
        sequence.num_slots = len(table) * self.block_size - self.num_lookahead_slots
        return copies

    def _num_new_blocks(
        self, chunks: Iterable[tuple[Sequence, int]], tables: dict[int, list[int]], pool: BlockAllocator
    ) -> int:
        """Blocks that these sequences take to store so many tokens past their computed ones: new ones and copies."""
        num_new = 0
        writers: dict[int, int] = {}  # of shared blocks
        for sequence, num_tokens in chunks:
            table = tables[sequence.id]
            end = self._num_blocks_ahead(sequence.num_computed_tokens + num_tokens)
            num_new += max(0, end - len(table))
            for block in table[sequence.num_computed_tokens // self.block_size : end]:
                if pool.ref_count(block) > 1:
                    writers[block] = writers.get(block, 0) + 1
        # Of a block's holders the last to write finds itself alone and needs no copy.
        return num_new + sum(min(count, pool.ref_count(block) - 1) for block, count in writers.items())

    def can_swap_out(self, group: SequenceGroup) -> bool:
        """Whether host memory has room for all of a running group's blocks."""
        return len(self._distinct(group, self.tables)) <= self.host.num_free

    def swap_out(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Move a group's tables to host blocks; returns the pairs of device and host block to copy."""
        return self._move(group, self.tables, self.device, self.host_tables, self.host)

    def can_swap_in(self, group: SequenceGroup, *, leave_watermark: bool) -> AllocStatus:
        """Whether a swapped group fits, with room for the tokens that it computes next."""
        next_tokens = [(s, s.num_uncomputed_tokens) for s in group.live if s.id in self.host_tables]
        needed = len(self._distinct(group, self.host_tables))
        needed += self._num_new_blocks(next_tokens, self.host_tables, self.host)
        if needed > self.device.num_blocks:
            return AllocStatus.NEVER
        reserve = self.num_watermark_blocks if leave_watermark else 0
        return AllocStatus.OK if needed + reserve <= self.device.num_free else AllocStatus.LATER

    def swap_in(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Move a group's tables back to device blocks; returns the pairs of host and device block to copy."""
        for sequence in group.live:
            sequence.num_known_blocks = 0
        return self._move(group, self.host_tables, self.host, self.tables, self.device)

    def _distinct(self, group: SequenceGroup, tables: dict[int, list[int]]) -> set[int]:
        return {block for sequence in group.live for block in tables.get(sequence.id, ())} - {NO_BLOCK}

    def _move(
        self,
        group: SequenceGroup,
        tables_from: dict[int, list[int]],
        pool_from: BlockAllocator,
        tables_to: dict[int, list[int]],
        pool_to: BlockAllocator,
    ) -> list[tuple[int, int]]:
        """A block that several of the group share is copied once, and shared again where it arrives."""
        arrived: dict[int, int] = {}
        for sequence in group.live:
            if sequence.id not in tables_from:
                continue
            table = tables_from.pop(sequence.id)
            for block in reversed(table):  # the last block first, as when they are freed
                if block == NO_BLOCK:
                    continue
                if block in arrived:
                    pool_to.share(arrived[block])
                else:
                    arrived[block] = pool_to.allocate()
                pool_from.free(block)
            tables_to[sequence.id] = [arrived.get(block, NO_BLOCK) for block in table]
        return list(arrived.items())

    def free(self, sequence: Sequence) -> None:
        """Let go of a sequence's blocks, wherever they are; nothing happens when it has none."""
        for tables, pool in ((self.tables, self.device), (self.host_tables, self.host)):
            for block in reversed(tables.pop(sequence.id, ())):
                if block != NO_BLOCK:
                    pool.free(block)

    def check(self) -> None:
        """Assert on both pools that free + held = total and that reference counts equal the tables."""
        for pool, tables in ((self.device, self.tables), (self.host, self.host_tables)):
            pool.check()
            held = Counter(block for table in tables.values() for block in table)
            for block in range(pool.num_blocks):
                assert pool.ref_count(block) == held[block], (
                    f"block {block} is counted {pool.ref_count(block)} times and stands in {held[block]} tables"
                )
