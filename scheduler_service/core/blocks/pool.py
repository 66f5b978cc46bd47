"""One memory's blocks and the tables of the sequences that are in it, and how a group moves from one to the other.

Blocks keep their keys on the way: what the other pool already has under a key is shared there, and only the rest is
copied.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

from scheduler_service.core.blocks.allocator import BlockAllocator, Content
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup

NO_BLOCK = -1
"""Stands in a table where a block was let go of."""


class Pool:
    """The blocks of the device or of the host, and by sequence id the tables that they stand in."""

    __slots__ = ("blocks", "tables")

    def __init__(self, blocks: BlockAllocator) -> None:
        self.blocks = blocks
        self.tables: dict[int, list[int]] = {}

    def contents(self, group: SequenceGroup) -> dict[int, list[Content]]:
        """A group's tables, with what the blocks hold instead of their numbers."""
        return {s.id: self.blocks.contents(self.tables[s.id]) for s in group.with_tables if s.id in self.tables}

    def held_by(self, group: SequenceGroup) -> Counter[int]:
        """The blocks that a group holds, and how often they stand in its tables."""
        return Counter(self.held_by_each(group))

    def held_by_each(self, group: SequenceGroup) -> list[int]:
        """The blocks in a group's tables, as often as they stand there."""
        return [block for s in group.with_tables for block in self.tables.get(s.id, ())]

    def free(self, table: SequenceOf[int]) -> None:
        """Let go of a table's blocks, the last first: see `Evictor`."""
        for block in reversed(table):
            if block != NO_BLOCK:
                self.blocks.free(block)

    def check(self) -> None:
        """Assert that free + held = total and that reference counts equal the tables."""
        self.blocks.check()
        held = Counter(block for table in self.tables.values() for block in table)
        for block in range(self.blocks.num_blocks):
            assert self.blocks.ref_count(block) == held[block], (
                f"block {block} is counted {self.blocks.ref_count(block)} times and stands in {held[block]} tables"
            )


def own_contents(tables: Mapping[int, SequenceOf[Content]]) -> Counter[Content]:
    """The contents of a group's tables, and how often each stands in them."""
    own = Counter(itertools.chain(*tables.values()))
    del own[NO_BLOCK]
    return own


def move(
    group: SequenceGroup, source: Pool, target: Pool, num_filled: Callable[[Sequence], int]
) -> list[tuple[int, int]]:
    """Move a group's tables; returns the blocks to copy, as pairs of source and target.

    Each content arrives once, and is copied if it is not found there. Of each table `num_filled` blocks have tokens;
    the others are not copied. What is found is held before any block is allocated, because that may give up what could
    be found.
    """
    contents = source.contents(group)
    arrived: dict[Content, int] = {}
    for content in own_contents(contents):
        if (block := target.blocks.find(content)) is not None:
            target.blocks.share(block)
            arrived[content] = block
    copies: list[tuple[int, int]] = []
    for sequence in group.with_tables:
        if sequence.id not in contents:
            continue
        table = source.tables.pop(sequence.id)
        end = num_filled(sequence)
        for index, content in enumerate(contents[sequence.id]):
            if content != NO_BLOCK and content not in arrived:
                block = arrived[content] = target.blocks.allocate()
                if isinstance(content, bytes):
                    target.blocks.publish(block, content, source.blocks.parent(table[index]))
                if index < end:
                    copies.append((table[index], block))
        target.tables[sequence.id] = [arrived.get(content, NO_BLOCK) for content in contents[sequence.id]]
        for block in target.tables[sequence.id]:
            if block != NO_BLOCK:
                target.blocks.share(block)
        source.free(table)
    for block in arrived.values():  # the tables hold them now
        target.blocks.free(block)
    return copies
