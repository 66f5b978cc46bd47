"""The block tables of one memory (device or host), their sizes, and moves between the memories."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from scheduler_service.core.blocks.allocator import BlockAllocator, Content
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup

NO_BLOCK = -1
"""Entry of a block table in place of a freed block."""


@dataclass(frozen=True, slots=True)
class TableSizes:
    """The sizes of one worker's block tables. With `num_blocks` 0, no keys and values are stored. A table covers the
    next step's tokens and `num_lookahead_slots` more."""

    block_size: int
    num_blocks: int
    num_lookahead_slots: int
    sliding_window: int
    max_blocks_per_sequence: int
    max_sequence_tokens: int

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) if self.num_blocks else 0

    def blocks_ahead(self, num_tokens: int) -> int:
        """Entries of a table for `num_tokens` tokens and the lookahead slots."""
        return self.blocks_of(num_tokens + self.num_lookahead_slots)

    def slots(self, num_blocks: int) -> int:
        return num_blocks * self.block_size - self.num_lookahead_slots

    def first_blocks(self, sequence: Sequence) -> int:
        return self._within_window(self.blocks_ahead(sequence.num_tokens))

    def blocks_of_group(self, group: SequenceGroup) -> int:
        """Number of blocks for the group's present tokens. Full blocks of the prompt are shared."""
        leader, *followers = group.live
        lengths = [follower.num_tokens for follower in followers]
        needed = self.first_blocks(leader) + sum(self._own_blocks(group, length, length) for length in lengths)
        return needed + self.blocks_of(group.num_encoder_tokens)

    def never_fits(self, group: SequenceGroup) -> bool:
        """Whether a waiting group with outputs of maximum length needs more than the whole pool."""
        if not self.num_blocks:
            return len(group.prompt_token_ids) > self.max_sequence_tokens
        most = group.max_num_tokens(self.max_sequence_tokens) - 1  # the last token is never computed, only sampled
        num_prompt = len(group.prompt_token_ids)
        leader, *followers = [sequence.num_tokens for sequence in group.live]
        followers += [num_prompt + 1] * (group.num_seqs - 1 - len(followers))  # beams of later steps
        shared = num_prompt // self.block_size
        needed = self._within_window(shared)
        needed += self._within_window(self.blocks_ahead(max(leader, most)) - shared)
        needed += sum(self._own_blocks(group, length, max(length, most)) for length in followers)
        needed = self._within_window(needed, 1 + len(followers))
        return needed + self.blocks_of(group.num_encoder_tokens) > self.num_blocks

    def _own_blocks(self, group: SequenceGroup, num_forked_with: int, num_tokens: int) -> int:
        """Blocks that a follower of `num_tokens` tokens does not share. Without output, it computes the last prompt
        token itself."""
        shared = min(len(group.prompt_token_ids), num_forked_with - 1) // self.block_size
        return self._within_window(self.blocks_ahead(num_tokens) - shared)

    def _within_window(self, num_blocks: int, num_sequences: int = 1) -> int:
        """`num_blocks`, or with a sliding window at most what `num_sequences` sequences hold at a time."""
        return min(num_blocks, num_sequences * self.max_blocks_per_sequence) if self.sliding_window else num_blocks


class Pool:
    """The blocks of one memory, and the tables that contain them, by sequence id."""

    __slots__ = ("blocks", "tables")

    def __init__(self, blocks: BlockAllocator) -> None:
        self.blocks = blocks
        self.tables: dict[int, list[int]] = {}

    def contents(self, group: SequenceGroup) -> dict[int, list[Content]]:
        """A group's block tables, with contents in place of block numbers."""
        return {s.id: self.blocks.contents(self.tables[s.id]) for s in group.with_tables if s.id in self.tables}

    def held_by(self, group: SequenceGroup) -> Counter[int]:
        return Counter(self.held_by_each(group))

    def held_by_each(self, group: SequenceGroup) -> list[int]:
        return [block for s in group.with_tables for block in self.tables.get(s.id, ())]

    def free(self, table: SequenceOf[int]) -> None:
        """Free a table's blocks, the last block first, because the first freed is evicted first."""
        for block in reversed(table):
            if block != NO_BLOCK:
                self.blocks.free(block)

    def check(self) -> None:
        self.blocks.check()
        held = Counter(block for table in self.tables.values() for block in table)
        for block in range(self.blocks.num_blocks):
            assert self.blocks.ref_count(block) == held[block], (
                f"block {block} is counted {self.blocks.ref_count(block)} times and stands in {held[block]} tables"
            )


def own_contents(tables: Mapping[int, SequenceOf[Content]]) -> Counter[Content]:
    own = Counter(itertools.chain(*tables.values()))
    del own[NO_BLOCK]
    return own


def move(
    group: SequenceGroup, source: Pool, target: Pool, num_filled: Callable[[Sequence], int]
) -> list[tuple[int, int]]:
    """Move a group's tables. Returns pairs of source and target block to copy.

    Blocks keep their keys. Contents that the target pool already has are shared, not copied. Only the first
    `num_filled` blocks of a table contain tokens. Found blocks are held before any allocation, which could evict them.
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
