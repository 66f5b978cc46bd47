"""The blocks of the slow scheduler: objects without numbers, and nobody counts who holds one; all tables are asked.

A block may have a key, the salt and all the tokens that it can be found by. Free ones that have one are kept in a list,
and the first is given up when nothing else is free: the one let go of longest ago.
"""

from fractions import Fraction
from math import inf

from slow_groups import Block, SlowGroup, SlowSequence

from scheduler_service.core import PreemptionMode, SchedulerConfig


class SlowBlocks:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.running: list[SlowGroup] = []
        self.swapped: list[SlowGroup] = []
        self.let_go: list[Block] = []

    def holders(self, block: Block | None) -> int:
        return sum(block in (s.device or ()) for s in self.sequences()) if block else 0

    def sequences(self) -> list[SlowSequence]:
        return [sequence for group in self.running + self.swapped for sequence in group.sequences]

    @property
    def num_free(self) -> int:
        held = {block for sequence in self.sequences() for block in sequence.device or ()} - {None}
        return self.config.num_device_blocks - len(held)

    @property
    def num_host_free(self) -> int:
        held = {block for sequence in self.sequences() for block in sequence.host or ()} - {None}
        return self.config.num_host_blocks - len(held)

    @property
    def num_reserved(self) -> int:
        """What admission leaves free for those who run already."""
        return int(self.config.watermark * self.config.num_device_blocks) if self.running else 0

    def add_block(self, sequence: SlowSequence) -> None:
        assert self.num_free
        if self.num_free == len(self.let_go):
            self.let_go.pop(0).key = None
        sequence.device.append(Block())

    def drop_blocks(self, sequence: SlowSequence, end: int) -> None:
        """Let go of a table's first blocks, the deepest of them first."""
        for index in reversed(range(end)):
            block, sequence.device[index] = sequence.device[index], None
            if block and block.key and not self.holders(block):
                self.let_go.append(block)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def first_blocks(self, sequence: SlowSequence) -> int:
        needed = self.blocks_for(len(sequence.token_ids) + self.config.num_lookahead_slots)
        return min(needed, self.config.max_blocks_per_sequence) if self.config.sliding_window else needed

    def blocks_of(self, group: SlowGroup) -> int:
        """With the full blocks of the prompt, which all sequences share, once."""
        needed = [self.first_blocks(sequence) for sequence in group.live]
        shared = min(len(group.prompt) // self.config.block_size, needed[0])
        return sum(needed) - shared * (len(needed) - 1)

    def key_of(self, sequence: SlowSequence, index: int) -> tuple[bytes, tuple[int, ...]]:
        return sequence.group.root, tuple(sequence.token_ids[: (index + 1) * self.config.block_size])

    def find(self, key: tuple[bytes, tuple[int, ...]]) -> Block | None:
        held = [block for sequence in self.sequences() for block in sequence.device or () if block]
        return next((block for block in held + self.let_go if block.key == key), None)

    def cached(self, sequence: SlowSequence) -> list[Block]:
        found: list[Block] = []
        if self.config.prefix_caching and not self.config.sliding_window:
            for index in range((len(sequence.token_ids) - 1) // self.config.block_size):
                if (block := self.find(self.key_of(sequence, index))) is None:
                    break
                found.append(block)
        return found

    def offer(self, sequence: SlowSequence) -> None:
        """Make the full blocks of what was stored findable, each once, unless another block has the same key."""
        if sequence.device is None or not self.config.prefix_caching or self.config.sliding_window:
            return
        for index in range(sequence.num_offered, sequence.stored // self.config.block_size):
            key = self.key_of(sequence, index)
            if self.find(key) is None and sequence.device[index].key is None:
                sequence.device[index].key = key
            sequence.num_offered = index + 1

    def fork(self, parent: SlowSequence, child: SlowSequence, num_tokens: int) -> None:
        child.device = parent.device[: self.blocks_for(num_tokens)]
        child.computed = child.stored = num_tokens
        child.parent = parent
        child.num_offered = min(parent.num_offered, num_tokens // self.config.block_size)

    def num_new_blocks(self, chunks: list[tuple[SlowSequence, int]]) -> int:
        """Tried out on lists: blocks to add, and a copy for every writer of a shared block but the last."""
        tables = {s: list(s.device or s.host or ()) for group in self.running + self.swapped for s in group.sequences}
        num_new = 0
        for sequence, num_tokens in chunks:
            table = tables[sequence]
            end = self.blocks_for(sequence.computed + num_tokens + self.config.num_lookahead_slots)
            for index in range(sequence.computed // self.config.block_size, end):
                if index >= len(table):
                    table.append(Block())
                    num_new += 1
                elif sum(table[index] in other for other in tables.values()) > 1:
                    table[index] = Block()
                    num_new += 1
        return num_new

    def append_slots(self, sequence: SlowSequence, num_tokens: int) -> int:
        """Returns the number of copies."""
        num_copies, table = 0, sequence.device
        end = self.blocks_for(sequence.computed + num_tokens + self.config.num_lookahead_slots)
        for index in range(sequence.computed // self.config.block_size, end):
            if index >= len(table):
                self.add_block(sequence)
            elif self.holders(table[index]) > 1:
                self.add_block(sequence)
                table[index] = table.pop()
                num_copies += 1
            else:
                table[index].key = None
        return num_copies

    def mode_for(self, group: SlowGroup) -> PreemptionMode:
        config = self.config
        held = {block for sequence in group.live for block in sequence.device or ()} - {None}
        if config.preemption_mode is PreemptionMode.RECOMPUTE or len(held) > self.num_host_free:
            return PreemptionMode.RECOMPUTE
        swap_speed, prefill_speed = config.swap_bytes_per_second, config.prefill_tokens_per_second
        swap = Fraction(2 * config.block_bytes, swap_speed) if swap_speed else inf
        recompute = Fraction(config.block_size, prefill_speed) if prefill_speed else inf
        swaps = config.preemption_mode is PreemptionMode.SWAP or swap < recompute
        return PreemptionMode.SWAP if swaps else PreemptionMode.RECOMPUTE

    def move(self, group: SlowGroup, *, to_host: bool) -> int:
        """Returns how many blocks were copied: one that several sequences of the group share is copied once."""
        copy_of: dict[Block, Block] = {}
        for sequence in group.live:
            if to_host and sequence.device is not None:
                sequence.host = [block and copy_of.setdefault(block, Block()) for block in sequence.device]
                self.drop_blocks(sequence, len(sequence.device))
                sequence.device = None
            elif not to_host and sequence.host is not None:
                sequence.device = []
                for block in sequence.host:
                    if block and block not in copy_of:
                        self.add_block(sequence)
                        copy_of[block] = sequence.device.pop()
                    sequence.device.append(block and copy_of[block])
                sequence.host = None
                sequence.is_table_known = False
        return len(copy_of)
