"""The blocks of one memory (device or host), the block tables in it, and moves of a group from one memory to the other.

Blocks keep their keys when they are moved. If the target pool has a block with the same key, the moved table shares
that block, and nothing is copied.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

from scheduler_service.core.blocks.allocator import BlockAllocator, Content
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup

NO_BLOCK = -1
"""Entry of a block table in place of a block that was freed."""


class Pool:
    """The blocks of the device or of the host, and the tables that contain them, by sequence id."""

    __slots__ = ("blocks", "tables")

    def __init__(self, blocks: BlockAllocator) -> None:
        self.blocks = blocks
        self.tables: dict[int, list[int]] = {}

    def contents(self, group: SequenceGroup) -> dict[int, list[Content]]:
        """A group's block tables, with the contents of blocks in place of block numbers."""
        return {s.id: self.blocks.contents(self.tables[s.id]) for s in group.with_tables if s.id in self.tables}

    def held_by(self, group: SequenceGroup) -> Counter[int]:
        """The blocks that a group holds, and how often each block is in the group's tables."""
        return Counter(self.held_by_each(group))

    def held_by_each(self, group: SequenceGroup) -> list[int]:
        """The blocks in a group's tables, with repetitions."""
        return [block for s in group.with_tables for block in self.tables.get(s.id, ())]

    def free(self, table: SequenceOf[int]) -> None:
        """Free a table's blocks, the last block first, so that the `Evictor` evicts it first."""
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
    """The contents in a group's tables, and how often each content occurs."""
    own = Counter(itertools.chain(*tables.values()))
    del own[NO_BLOCK]
    return own


def move(
    group: SequenceGroup, source: Pool, target: Pool, num_filled: Callable[[Sequence], int]
) -> list[tuple[int, int]]:
    """Move a group's tables. Returns the blocks to copy, as pairs of source and target.

    A block that is in several tables is copied once. A block whose content the target pool already has is not copied.
    The first `num_filled` blocks of a table contain tokens; the later blocks are not copied. Blocks that are found in
    the target pool are held before any block is allocated, because an allocation can evict a free block.
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
    for block in arrived.values():  # the tables hold these blocks now
        target.blocks.free(block)
    return copies
