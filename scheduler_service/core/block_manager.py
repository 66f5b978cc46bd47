"""Block tables: which blocks hold the keys and values of each sequence, in the order of positions.

A table covers at least the computed tokens of its sequence. A block may stand in several tables while nobody writes
to it; whoever writes to a shared block gets a copy first (copy on write).
"""

import enum
from collections import Counter
from collections.abc import Iterable

from scheduler_service.core.block_allocator import BlockAllocator
from scheduler_service.core.sequence import Sequence, SequenceGroup


class AllocStatus(enum.Enum):
    """Whether a waiting group's blocks can be had: now, once others finish, or not even with the whole pool."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class BlockManager:
    """Owns the device blocks of one worker and every sequence's table of them."""

    def __init__(self, block_size: int, num_device_blocks: int, watermark: float = 0.0) -> None:
        self.block_size = block_size
        self.device = BlockAllocator(num_device_blocks)
        self.num_watermark_blocks = int(watermark * num_device_blocks)
        self.tables: dict[int, list[int]] = {}

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_of(self, group: SequenceGroup) -> int:
        """Blocks that the group needs to reach the state it is in, its prompt's full blocks shared."""
        leader, *followers = group.live
        shared = leader.num_prompt_tokens // self.block_size
        return self.num_blocks(len(leader.token_ids)) + sum(
            self.num_blocks(len(follower.token_ids)) - shared for follower in followers
        )

    def can_allocate(self, group: SequenceGroup, *, leave_watermark: bool) -> AllocStatus:
        """Whether a waiting group fits; `leave_watermark` keeps blocks free for those already running."""
        needed = self.num_blocks_of(group)
        if needed > self.device.num_blocks:
            return AllocStatus.NEVER
        reserve = self.num_watermark_blocks if leave_watermark else 0
        return AllocStatus.OK if needed + reserve <= self.device.num_free else AllocStatus.LATER

    def allocate(self, leader: Sequence) -> None:
        """Give a sequence without a table the blocks for all of its tokens."""
        assert leader.id not in self.tables
        self.tables[leader.id] = [self.device.allocate() for _ in range(self.num_blocks(len(leader.token_ids)))]

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let a sequence without a table share the blocks of the parent's first `num_tokens` tokens."""
        assert child.id not in self.tables
        blocks = self.tables[parent.id][: self.num_blocks(num_tokens)]
        for block in blocks:
            self.device.share(block)
        self.tables[child.id] = blocks

    def can_append_slots(self, chunks: Iterable[tuple[Sequence, int]]) -> bool:
        """Whether these sequences can all have room for this many tokens past their computed ones."""
        num_new = 0
        writers: Counter[int] = Counter()  # of shared blocks
        for sequence, num_tokens in chunks:
            table = self.tables[sequence.id]
            end = self.num_blocks(sequence.num_computed_tokens + num_tokens)
            num_new += max(0, end - len(table))
            for block in table[sequence.num_computed_tokens // self.block_size : end]:
                if self.device.ref_count(block) > 1:
                    writers[block] += 1
        # Of a block's holders the last to write finds itself alone and needs no copy.
        num_copies = sum(min(count, self.device.ref_count(block) - 1) for block, count in writers.items())
        return num_new + num_copies <= self.device.num_free

    def append_slots(self, sequence: Sequence, num_tokens: int) -> tuple[int | None, list[tuple[int, int]]]:
        """Make room for `num_tokens` tokens past the computed ones, in blocks that nobody else holds.

        Returns the first index of the table that changed (None when nothing did) and the blocks to copy, as pairs
        of source and destination.
        """
        table = self.tables[sequence.id]
        first = sequence.num_computed_tokens // self.block_size
        end = self.num_blocks(sequence.num_computed_tokens + num_tokens)
        changed: int | None = None
        copies: list[tuple[int, int]] = []
        for index in range(first, min(end, len(table))):
            block = table[index]
            if self.device.ref_count(block) > 1:
                table[index] = self.device.allocate()
                self.device.free(block)
                copies.append((block, table[index]))
                changed = index if changed is None else changed
        if end > len(table):
            changed = len(table) if changed is None else changed
            table.extend(self.device.allocate() for _ in range(end - len(table)))
        return changed, copies

    def free(self, sequence: Sequence) -> None:
        """Let go of a sequence's blocks; nothing happens when it has none."""
        for block in reversed(self.tables.pop(sequence.id, ())):
            self.device.free(block)

    def check(self) -> None:
        """Assert that free + held = total and that reference counts equal the tables."""
        self.device.check()
        held = Counter(block for table in self.tables.values() for block in table)
        for block in range(self.device.num_blocks):
            assert self.device.ref_count(block) == held[block], (
                f"block {block} is counted {self.device.ref_count(block)} times and stands in {held[block]} tables"
            )
