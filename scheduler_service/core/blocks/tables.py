"""The block tables of one memory (device or host), their sizes, and moves between the memories."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from scheduler_service.core.blocks.allocator import BlockAllocator, Content
from scheduler_service.core.config import LayerGroup
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup

NO_BLOCK = -1
"""Entry of a block table in place of a freed block."""


@dataclass(frozen=True, slots=True)
class TableSizes:
    """The sizes of one group of layers' block tables. With `num_blocks` 0, no keys and values are stored. A table
    covers the next step's tokens and `num_lookahead_slots` more."""

    layers: LayerGroup
    block_size: int
    num_blocks: int
    num_lookahead_slots: int
    max_chunk: int
    """Maximum number of tokens of a chunk, plus lookahead slots."""
    forks_early: bool = False
    """Whether followers fork before the last prompt token, as states require. Each follower computes this token."""

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) if self.num_blocks else 0

    def blocks_ahead(self, num_tokens: int) -> int:
        """Entries of a table for `num_tokens` tokens and the lookahead slots."""
        return -(-(num_tokens + self.num_lookahead_slots) // self.block_size) if self.num_blocks else 0

    def filled(self, sequence: Sequence) -> int:
        """Entries of a table with computed tokens."""
        return self.blocks_of(sequence.num_computed_tokens)

    def slots(self, num_blocks: int) -> int:
        return num_blocks * self.block_size - self.num_lookahead_slots

    def first_blocks(self, sequence: Sequence, num_cached_tokens: int = 0) -> int:
        """Entries of a new table whose first tokens are cached."""
        end = self.blocks_ahead(sequence.num_tokens)
        if not self.layers.window:
            return end
        return min(end, self.layers.first_needed(num_cached_tokens) + self.layers.blocks_within_window(self.max_chunk))

    def blocks_of_group(self, group: SequenceGroup) -> int:
        """Number of blocks for the group's present tokens. Full blocks of the prompt are shared."""
        leader, *followers = group.live
        lengths = [follower.num_tokens for follower in followers]
        needed = self.first_blocks(leader) + sum(self._own_blocks(group, length, length) for length in lengths)
        return needed + self.blocks_of(group.num_encoder_tokens)

    def most_blocks_of_group(self, group: SequenceGroup, max_sequence_tokens: int) -> int:
        """Number of blocks for a waiting group with outputs of maximum length."""
        most = group.max_num_tokens(max_sequence_tokens) - 1  # the last token is never computed, only sampled
        num_prompt = len(group.prompt_token_ids)
        leader, *followers = [sequence.num_tokens for sequence in group.live]
        followers += [num_prompt + 1] * (group.num_seqs - 1 - len(followers))  # beams of later steps
        shared = num_prompt // self.block_size
        needed = self._within_window(shared)
        needed += self._within_window(self.blocks_ahead(max(leader, most)) - shared)
        needed += sum(self._own_blocks(group, length, max(length, most)) for length in followers)
        needed = self._within_window(needed, 1 + len(followers))
        return needed + self.blocks_of(group.num_encoder_tokens)

    def _own_blocks(self, group: SequenceGroup, num_forked_with: int, num_tokens: int) -> int:
        """Blocks that a follower of `num_tokens` tokens does not share. Without output, it computes the last prompt
        token itself."""
        shared = min(len(group.prompt_token_ids) - self.forks_early, num_forked_with - 1) // self.block_size
        return self._within_window(self.blocks_ahead(num_tokens) - shared)

    def _within_window(self, num_blocks: int, num_sequences: int = 1) -> int:
        """`num_blocks`, or with a window at most what `num_sequences` sequences hold at a time."""
        if not self.layers.window:
            return num_blocks
        return min(num_blocks, num_sequences * self.layers.blocks_within_window(self.max_chunk))


Tables = dict[int, list[int]]
"""The block tables of one group of layers, by sequence id."""


class Pool:
    """The blocks of one memory, and the tables that contain them: for each group of layers, by sequence id."""

    __slots__ = ("all_tables", "blocks", "held", "tables")

    def __init__(self, blocks: BlockAllocator, num_layer_groups: int = 1) -> None:
        self.blocks = blocks
        self.all_tables: list[Tables] = [{} for _ in range(num_layer_groups)]
        self.tables = self.all_tables[0]
        self.held: Callable[[], Iterable[int]] = tuple
        """Blocks that are held without being in a table."""

    def tables_of(self, group: SequenceGroup) -> list[tuple[int, Sequence, list[int]]]:
        """A group's tables, each with its group of layers and its sequence."""
        with_tables = group.with_tables
        return [
            (number, sequence, tables[sequence.id])
            for number, tables in enumerate(self.all_tables)
            for sequence in with_tables
            if sequence.id in tables
        ]

    def contents(self, group: SequenceGroup) -> list[list[Content]]:
        """A group's block tables in the order of `tables_of`, with contents in place of block numbers."""
        return [self.blocks.contents(table) for _, _, table in self.tables_of(group)]

    def held_by(self, group: SequenceGroup) -> Counter[int]:
        return Counter(self.held_by_each(group))

    def held_by_each(self, group: SequenceGroup) -> list[int]:
        return [block for _, _, table in self.tables_of(group) for block in table]

    def blocks_of(self, sequence_id: int) -> Iterator[int]:
        """The blocks of a sequence in all groups of layers."""
        tables = (tables.get(sequence_id, ()) for tables in self.all_tables)
        return (block for table in tables for block in table if block != NO_BLOCK)

    def free(self, sequence_id: int) -> None:
        """Free a sequence's blocks."""
        for tables in self.all_tables:
            self.free_table(tables.pop(sequence_id, ()))

    def free_table(self, table: SequenceOf[int]) -> None:
        """Free a table's blocks, the last block first, because the first freed is evicted first."""
        for block in reversed(table):
            if block != NO_BLOCK:
                self.blocks.free(block)

    def check(self) -> None:
        self.blocks.check()
        held = Counter(block for tables in self.all_tables for table in tables.values() for block in table)
        held.update(self.held())
        for block in range(self.blocks.num_blocks):
            assert self.blocks.ref_count(block) == held[block], (
                f"block {block} is counted {self.blocks.ref_count(block)} times and stands in {held[block]} tables"
            )


def own_contents(tables: Iterable[SequenceOf[Content]]) -> Counter[Content]:
    own = Counter(itertools.chain.from_iterable(tables))
    del own[NO_BLOCK]
    return own


def move(group: SequenceGroup, source: Pool, target: Pool, sizes: SequenceOf[TableSizes]) -> list[tuple[int, int]]:
    """Move a group's tables. Returns pairs of source and target block to copy.

    Blocks keep their keys. Contents that the target pool already has are shared, not copied. Blocks without computed
    tokens are not copied. Found blocks are held before any allocation, which could evict them.
    """
    contents = source.contents(group)
    arrived: dict[Content, int] = {}
    for content in own_contents(contents):
        if (block := target.blocks.find(content)) is not None:
            target.blocks.share(block)
            arrived[content] = block
    copies: list[tuple[int, int]] = []
    for (number, sequence, table), its_contents in zip(source.tables_of(group), contents, strict=True):
        end = sizes[number].filled(sequence)
        for index, content in enumerate(its_contents):
            if content != NO_BLOCK and content not in arrived:
                block = arrived[content] = target.blocks.allocate()
                if isinstance(content, bytes):
                    target.blocks.publish(block, content, source.blocks.parent(table[index]))
                if index < end:
                    copies.append((table[index], block))
        target.all_tables[number][sequence.id] = moved = [arrived.get(content, NO_BLOCK) for content in its_contents]
        for block in moved:
            if block != NO_BLOCK:
                target.blocks.share(block)
        del source.all_tables[number][sequence.id]
        source.free_table(table)
    for block in arrived.values():  # the tables hold these blocks now
        target.blocks.free(block)
    return copies
