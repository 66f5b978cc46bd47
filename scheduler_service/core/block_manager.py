"""Block tables: which blocks hold the keys and values of each sequence, in the order of positions.

A table covers at least the computed tokens of its sequence. A block may stand in several tables while no sequence
writes to it; a sequence that does gets a copy of a shared block first (copy on write).

A sequence that is swapped out has a table of host blocks instead. Blocks keep their keys on the way out and on the way
back: what the other pool already has under a key is shared there, and only the rest is copied. The copies can be found
as soon as they are planned, because every step does its copies before it reads, and steps are done in order.

With a sliding window a table's leading entries become NO_BLOCK as soon as no token to come attends to them.
"""

import enum
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from scheduler_service.core.block_allocator import BlockAllocator, Content
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
        max_sequence_tokens: int | None = None,
        directory: PrefixDirectory | None = None,
        bit: int = 1,
    ) -> None:
        self.num_lookahead_slots = num_lookahead_slots
        self.sliding_window = sliding_window
        self.max_blocks_per_sequence = max_blocks_per_sequence or num_device_blocks
        self.max_sequence_tokens = max_sequence_tokens or num_device_blocks * block_size - num_lookahead_slots
        self.block_size = block_size
        self.device = BlockAllocator(num_device_blocks, directory, bit)
        self.host = BlockAllocator(num_host_blocks)
        self.num_watermark_blocks = int(watermark * num_device_blocks)
        self.prefix_caching = prefix_caching
        self.tables: dict[int, list[int]] = {}
        self.host_tables: dict[int, list[int]] = {}
        self._pools = ((self.device, self.tables), (self.host, self.host_tables))

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _num_blocks_ahead(self, num_tokens: int) -> int:
        """Entries of a table with room for so many tokens and what may follow them."""
        return self.num_blocks(num_tokens + self.num_lookahead_slots)

    def num_table_entries(self, sequence: Sequence, num_tokens: int) -> int:
        """Entries of a table on the device, once it has room for so many tokens past the computed ones."""
        num_ahead = self._num_blocks_ahead(sequence.num_computed_tokens + num_tokens)
        return max(num_ahead, len(self.tables[sequence.id]))

    def _within_window(self, num_blocks: int, num_sequences: int = 1) -> int:
        """Of so many blocks those that sequences hold at a time: with a sliding window each lets go of some in time."""
        return min(num_blocks, num_sequences * self.max_blocks_per_sequence) if self.sliding_window else num_blocks

    def _num_first_blocks(self, sequence: Sequence) -> int:
        """Blocks that a sequence without any is given: for all its tokens, or the most that it ever holds."""
        return self._within_window(self._num_blocks_ahead(sequence.num_tokens))

    def num_blocks_of(self, group: SequenceGroup) -> int:
        """Blocks that the group needs to reach the state it is in, those of the prompt shared if only read."""
        leader, *followers = group.live
        lengths = [follower.num_tokens for follower in followers]
        return self._num_first_blocks(leader) + sum(self._num_own_blocks(group, length, length) for length in lengths)

    def never_fits(self, group: SequenceGroup) -> bool:
        """Whether a waiting group outgrows the whole pool, at the latest with its longest outputs."""
        most = group.max_num_tokens(self.max_sequence_tokens) - 1  # the last token is never computed
        num_prompt = len(group.prompt_token_ids)
        leader, *followers = [sequence.num_tokens for sequence in group.live]
        followers += [num_prompt + 1] * (group.num_seqs - 1 - len(followers))  # beams to come
        shared = num_prompt // self.block_size
        needed = self._within_window(shared)
        needed += self._within_window(self._num_blocks_ahead(max(leader, most)) - shared)
        needed += sum(self._num_own_blocks(group, length, max(length, most)) for length in followers)
        return self._within_window(needed, 1 + len(followers)) > self.device.num_blocks

    def _num_own_blocks(self, group: SequenceGroup, num_forked_with: int, num_tokens: int) -> int:
        """Blocks that a follower, which forks with so many tokens, shares with none when it has `num_tokens`.

        Without an output it computes the last prompt token itself: so a block that ends with the prompt is not shared.
        """
        shared = min(len(group.prompt_token_ids), num_forked_with - 1) // self.block_size
        return self._within_window(self._num_blocks_ahead(num_tokens) - shared)

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
        needed -= self.device.num_held(self._cached_blocks(group.live[0]), leaving)
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
        """Make the full blocks of a sequence's stored tokens findable, on the device or where they were swapped out."""
        num_full = sequence.num_stored_tokens // self.block_size
        if self.prefix_caching and num_full > sequence.num_published_blocks:
            for pool, tables in self._pools:
                if (table := tables.get(sequence.id)) is not None:
                    keys = self._keys(sequence, num_full)
                    for index in range(sequence.num_published_blocks, num_full):
                        pool.publish(table[index], keys[index])
                    sequence.num_published_blocks = num_full

    def withdraw(self, sequence: Sequence) -> None:
        """Take what the sequence's blocks hold out of the prefix cache, because it is not sound."""
        for pool, tables in self._pools:
            for block in tables.get(sequence.id, ()):
                if block != NO_BLOCK and (key := pool.key(block)) is not None:
                    pool.withdraw(block)
                    for other, _ in self._pools:
                        if (copy := other.find(key)) is not None:
                            other.withdraw(copy)

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
        num_full = (sequence.num_tokens - 1) // self.block_size
        return self._keys(sequence, num_full)[:num_full]

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """The longest cached prefix."""
        return self.device.find_run(self.cacheable_keys(sequence))

    def _keys(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Keys of at least the first `num_blocks` blocks, which must be full; computed once."""
        keys = sequence.block_keys
        for index in range(len(keys), num_blocks):
            tokens = sequence.tokens_between(index * self.block_size, (index + 1) * self.block_size)
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
        if not child.block_keys:  # those of what they share are the same
            child.block_keys = parent.block_keys[: num_tokens // self.block_size]
        child.forked_from = parent
        child.num_computed_tokens = child.num_stored_tokens = num_tokens
        child.num_slots = len(blocks) * self.block_size - self.num_lookahead_slots
        child.num_published_blocks = min(parent.num_published_blocks, num_tokens // self.block_size)

    def release_behind_window(self, sequence: Sequence) -> None:
        """Let go of the blocks that no token to come attends to; nothing happens without a sliding window."""
        if self.sliding_window and (table := self.tables.get(sequence.id)):
            num_certain = sequence.num_computed_tokens - sequence.num_draft_tokens  # guesses may be taken back
            end = max(0, num_certain - self.sliding_window + 1) // self.block_size
            for index in range(end - 1, -1, -1):
                if table[index] == NO_BLOCK:
                    break  # and so are those before it
                self.device.free(table[index])
                table[index] = NO_BLOCK

    def can_append_slots(self, chunks: Iterable[tuple[Sequence, int]]) -> bool:
        """Whether these sequences can all have room for this many tokens past their computed ones."""
        return self._num_new_blocks(chunks, self.tables, self.device.ref_count) <= self.device.num_free

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
        self,
        chunks: Iterable[tuple[Sequence, int]],
        tables: Mapping[int, SequenceOf[Content]],
        num_holders: Callable[[Any], int],
    ) -> int:
        """Blocks that these sequences take to store so many tokens past their computed ones: new ones and copies."""
        num_new = 0
        writers: Counter[Content] = Counter()  # of shared blocks
        for sequence, num_tokens in chunks:
            table = tables[sequence.id]
            end = self._num_blocks_ahead(sequence.num_computed_tokens + num_tokens)
            num_new += max(0, end - len(table))
            for block in table[sequence.num_computed_tokens // self.block_size : end]:
                if num_holders(block) > 1:
                    writers[block] += 1
        # Of a block's holders the last to write finds itself alone and needs no copy.
        return num_new + sum(min(count, num_holders(block) - 1) for block, count in writers.items())

    # ---- swapping

    def can_swap_out(self, group: SequenceGroup) -> bool:
        """Whether host memory has room for those of a running group's blocks that are not held there already."""
        own = self._own_contents(self._contents(group, self.device, self.tables))
        return self.host.num_taken(own) <= self.host.num_free

    def swap_out(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Move a group's tables to host blocks; returns the pairs of device and host block to copy."""
        return self._move(group, self.device, self.tables, self.host, self.host_tables)

    def can_swap_in(self, group: SequenceGroup, step_tokens: int, *, leave_watermark: bool) -> AllocStatus:
        """Whether a swapped group fits, with room for what each sequence could compute in a step of so many tokens.

        There need not be room for a whole prompt at a time: with a sliding window it may be larger than the pool.
        """
        tables = self._contents(group, self.host, self.host_tables)
        own = self._own_contents(tables)
        next_tokens = [(s, min(s.num_uncomputed_tokens, step_tokens)) for s in group.live if s.id in tables]
        if len(own) + self._num_new_blocks(next_tokens, tables, own.__getitem__) > self.device.num_blocks:
            return AllocStatus.NEVER
        needed = self.device.num_taken(own)
        needed += self._num_new_blocks(next_tokens, tables, lambda c: own[c] + self.device.num_holders(c))
        reserve = self.num_watermark_blocks if leave_watermark else 0
        return AllocStatus.OK if needed + reserve <= self.device.num_free else AllocStatus.LATER

    def swap_in(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Move a group's tables back to device blocks; returns the pairs of host and device block to copy."""
        for sequence in group.live:
            sequence.num_known_blocks = 0
        return self._move(group, self.host, self.host_tables, self.device, self.tables)

    def num_swap_copies(self, group: SequenceGroup) -> int:
        """Blocks to copy if a running group is swapped out and comes back.

        What other groups hold on the device need not come back. What only this one holds must: even where it can be
        found for now, the group makes room because others need those blocks.
        """
        contents = self._contents(group, self.device, self.tables)
        filled = {c for s in group.live for c in contents.get(s.id, ())[: self.num_blocks(s.num_computed_tokens)]}
        filled.discard(NO_BLOCK)
        held = Counter(itertools.chain(*(self.tables.get(s.id, ()) for s in group.live)))
        num_out = sum(self.host.find(content) is None for content in filled)
        return num_out + sum(not self._is_held_by_others(content, held) for content in filled)

    def num_tokens_to_recompute(self, group: SequenceGroup) -> int:
        """Computed tokens that a running group would compute again: those that no other group holds for it to find."""
        leader, *followers = group.live
        held = Counter(itertools.chain(*(self.tables.get(s.id, ()) for s in group.live)))
        kept = itertools.takewhile(lambda key: self._is_held_by_others(key, held), self.cacheable_keys(leader))
        num_tokens = max(0, leader.num_computed_tokens - sum(self.block_size for _ in kept))
        return num_tokens + sum(max(0, f.num_computed_tokens - f.num_prompt_tokens) for f in followers)

    def _is_held_by_others(self, content: Content, held: Counter[int]) -> bool:
        """Whether a device block of this content has holders besides those that `held` counts."""
        block = self.device.find(content)
        return block is not None and self.device.ref_count(block) > held[block]

    def _contents(
        self, group: SequenceGroup, pool: BlockAllocator, tables: Mapping[int, SequenceOf[int]]
    ) -> dict[int, list[Content]]:
        """A group's tables in one pool, with what the blocks hold instead of their numbers."""
        return {s.id: pool.contents(tables[s.id]) for s in group.live if s.id in tables}

    def _own_contents(self, tables: Mapping[int, SequenceOf[Content]]) -> Counter[Content]:
        """What a group's tables hold, and how often it stands in them."""
        own = Counter(itertools.chain(*tables.values()))
        del own[NO_BLOCK]
        return own

    def _move(
        self,
        group: SequenceGroup,
        pool_from: BlockAllocator,
        tables_from: dict[int, list[int]],
        pool_to: BlockAllocator,
        tables_to: dict[int, list[int]],
    ) -> list[tuple[int, int]]:
        """Each content arrives once, and is copied if it is not found there; a block without any tokens is not copied.

        What is found is held before any block is allocated, because that may give up what could be found.
        """
        contents = self._contents(group, pool_from, tables_from)
        arrived: dict[Content, int] = {}
        for content in self._own_contents(contents):
            if (block := pool_to.find(content)) is not None:
                pool_to.share(block)
                arrived[content] = block
        copies: list[tuple[int, int]] = []
        for sequence in group.live:
            if sequence.id not in contents:
                continue
            table = tables_from.pop(sequence.id)
            num_filled = self.num_blocks(sequence.num_computed_tokens)
            for index, content in enumerate(contents[sequence.id]):
                if content != NO_BLOCK and content not in arrived:
                    block = arrived[content] = pool_to.allocate()
                    if isinstance(content, bytes):
                        pool_to.publish(block, content)
                    if index < num_filled:
                        copies.append((table[index], block))
            tables_to[sequence.id] = [arrived.get(content, NO_BLOCK) for content in contents[sequence.id]]
            for block in tables_to[sequence.id]:
                if block != NO_BLOCK:
                    pool_to.share(block)
            self._free(table, pool_from)
        for block in arrived.values():  # the tables hold them now
            pool_to.free(block)
        return copies

    # ---- ends

    def free(self, sequence: Sequence) -> None:
        """Let go of a sequence's blocks, wherever they are; nothing happens when it has none."""
        for pool, tables in self._pools:
            self._free(tables.pop(sequence.id, []), pool)

    def _free(self, table: list[int], pool: BlockAllocator) -> None:
        for block in reversed(table):
            if block != NO_BLOCK:
                pool.free(block)

    def check(self) -> None:
        """Assert on both pools that free + held = total and that reference counts equal the tables."""
        for pool, tables in self._pools:
            pool.check()
            held = Counter(block for table in tables.values() for block in table)
            for block in range(pool.num_blocks):
                assert pool.ref_count(block) == held[block], (
                    f"block {block} is counted {pool.ref_count(block)} times and stands in {held[block]} tables"
                )
