"""The blocks of the slow scheduler: objects without numbers or reference counts; all tables are searched instead.

There are two pools, "device" and "host". A block's key is the salt and all tokens up to its end. Free cached blocks are
in a list, least recently freed first; the first is evicted when no other is free.
"""

from fractions import Fraction
from itertools import takewhile
from math import inf

from slow_groups import Block, Key, SlowGroup, SlowSequence

from scheduler_service.core import PreemptionMode, SchedulerConfig


class SlowBlocks:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.running: list[SlowGroup] = []
        self.swapped: list[SlowGroup] = []
        self.plan: list[tuple[SlowSequence, int, int]] = []  # sequence, tokens, copies on write
        self.let_go: dict[str, list[Block]] = {"device": [], "host": []}

    def sequences(self) -> list[SlowSequence]:
        """All sequences that may have tables."""
        groups = self.running + self.swapped
        return [sequence for g in groups for sequence in [*g.sequences, g.encoder] if sequence]

    def tables(self, pool: str) -> list[list[Block | None]]:
        return [getattr(sequence, pool) or [] for sequence in self.sequences()]

    def holders(self, block: Block | None) -> int:
        return sum(block in table for table in self.tables("device") + self.tables("host")) if block else 0

    def held(self, pool: str, but_by: list[SlowGroup] | None = None) -> set[Block]:
        """Blocks in any table, or in one of another group."""
        groups = [group for group in self.running + self.swapped if group not in (but_by or [])]
        sequences = [sequence for g in groups for sequence in [*g.sequences, g.encoder] if sequence]
        return {block for sequence in sequences for block in getattr(sequence, pool) or ()} - {None}

    @property
    def num_free(self) -> int:
        return self.config.num_device_blocks - len(self.held("device"))

    @property
    def num_host_free(self) -> int:
        return self.config.num_host_blocks - len(self.held("host"))

    @property
    def num_reserved(self) -> int:
        """Blocks that admission leaves free for running groups."""
        return int(self.config.watermark * self.config.num_device_blocks) if self.running else 0

    def new_block(self, pool: str) -> Block:
        num_free = self.num_free if pool == "device" else self.num_host_free
        assert num_free
        if num_free == len(self.let_go[pool]):
            self.let_go[pool].pop(0).key = None
        return Block()

    def drop_blocks(self, sequence: SlowSequence, end: int | None = None, pool: str = "device") -> None:
        """Free a table's first blocks, the last of them first."""
        table = getattr(sequence, pool) or []
        for index in reversed(range(len(table) if end is None else end)):
            block, table[index] = table[index], None
            if block and block.key and block.is_found and not self.holders(block):
                self.let_go[pool].append(block)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    @property
    def most_in_window(self) -> int:
        """Blocks that the window and a chunk touch."""
        return self.config.groups[0].blocks_within_window(
            self.config.max_num_batched_tokens + self.config.num_lookahead_slots
        )

    def first_needed(self, num_tokens: int) -> int:
        """The first block that tokens after these attend to."""
        window = self.config.sliding_window
        return max(0, num_tokens - window + 1) // self.config.block_size if window else 0

    def first_blocks(self, sequence: SlowSequence, num_cached: int = 0) -> int:
        """Entries of a new table whose first blocks are cached."""
        needed = self.blocks_for(len(sequence.token_ids) + self.config.num_lookahead_slots)
        if not self.config.sliding_window:
            return needed
        return min(needed, self.first_needed(num_cached * self.config.block_size) + self.most_in_window)

    def blocks_of(self, group: SlowGroup) -> int:
        """Blocks of all sequences; those of the prompt that a follower always shares with the leader count once."""
        leader, *followers = group.live
        in_encoder = self.blocks_for(len(group.encoder_tokens))
        return (
            in_encoder
            + self.first_blocks(leader)
            + sum(
                self.in_window(self.blocks_for(len(f.token_ids) + self.config.num_lookahead_slots) - self.num_shared(f))
                for f in followers
            )
        )

    def in_window(self, num_blocks: int) -> int:
        return min(num_blocks, self.most_in_window) if self.config.sliding_window else num_blocks

    def num_shared(self, follower: SlowSequence) -> int:
        """Full blocks that a follower shares: the prompt's, or one token less if its first output is not sampled."""
        start = min(len(follower.group.prompt), len(follower.token_ids) - 1)
        return start // self.config.block_size

    def never_fits(self, group: SlowGroup) -> bool:
        """Whether all outputs at their longest exceed the empty pool."""
        prompt, config = len(group.prompt), self.config
        longest = max(min(prompt + group.sampling.max_tokens, config.max_sequence_tokens), prompt + 1)
        sequences = list(group.live)
        while len(sequences) < group.num_seqs:  # beams, which go on from the whole prompt
            sequences.append(SlowSequence(group, 0, [*group.prompt, 0]))
        in_prompt = prompt // config.block_size
        needed = self.in_window(in_prompt)
        for number, sequence in enumerate(sequences):
            stored = max(len(sequence.token_ids), longest - 1)
            own = self.blocks_for(stored + config.num_lookahead_slots)
            needed += self.in_window(own - (self.num_shared(sequence) if number else in_prompt))
        if config.sliding_window:
            needed = min(needed, len(sequences) * self.most_in_window)
        return needed + self.blocks_for(len(group.encoder_tokens)) > config.num_device_blocks

    def key_of(self, sequence: SlowSequence, index: int) -> Key:
        """The key, which includes the encoder's input."""
        tokens = tuple(sequence.token_ids[: (index + 1) * self.config.block_size])
        of_group = sequence.group.root, tuple(sequence.group.encoder_tokens)
        return (*of_group, f"encoder's {index}" if sequence.is_encoder else tokens)

    def find(self, key: Key | None, pool: str = "device") -> Block | None:
        there = [block for table in self.tables(pool) for block in table if block] + self.let_go[pool]
        return next((block for block in there if key and block.key == key and block.is_found), None)

    def cached(self, sequence: SlowSequence) -> list[Block | None]:
        """The longest prefix of which everything is cached that later tokens attend to."""
        most = (len(sequence.token_ids) - 1) // self.config.block_size if self.config.prefix_caching else 0
        if self.config.sliding_window and len(sequence.group.live) > 1:  # whose windows the others share
            at_fork = min(len(sequence.group.prompt), *(len(other.token_ids) - 1 for other in sequence.group.live))
            most = min(most, at_fork // self.config.block_size)
        for length in range(most, 0, -1):
            start = self.first_needed(length * self.config.block_size)
            found = [self.find(self.key_of(sequence, index)) for index in range(start, length)]
            if None not in found:
                return [None] * start + found
        return []

    def num_in_run(self, sequence: SlowSequence) -> int:
        """Leading blocks that are cached."""
        most = (len(sequence.token_ids) - 1) // self.config.block_size if self.config.prefix_caching else 0
        there = (self.find(self.key_of(sequence, index)) is not None for index in range(most))
        return sum(1 for _ in takewhile(bool, there))

    def cached_encoder(self, group: SlowGroup) -> list[Block]:
        """All of an encoder's blocks, or none."""
        found: list[Block | None] = []
        if group.encoder and self.config.prefix_caching:
            num_blocks = self.blocks_for(len(group.encoder_tokens))
            found = [self.find(self.key_of(group.encoder, index)) for index in range(num_blocks)]
        return [] if None in found else [block for block in found if block]

    def expected(self) -> set[Key]:
        """Keys of blocks that running sequences will compute."""
        return {
            self.key_of(other, index)
            for group in self.running
            for other in group.live
            for index in range(other.num_offered, other.num_expected)
        }

    def awaited(self, sequence: SlowSequence, num_cached: int) -> Key | None:
        """The key behind the cached ones, if its block is expected."""
        if not self.config.prefix_caching:
            return None
        if num_cached >= (len(sequence.token_ids) - 1) // self.config.block_size:
            return None
        key = self.key_of(sequence, num_cached)
        return key if key in self.expected() else None

    def offer(self, sequence: SlowSequence, num_tokens: int) -> None:
        """Cache the full blocks of computed tokens, unless their keys are cached already."""
        pool = "device" if sequence.device is not None else "host"
        table = getattr(sequence, pool)
        if table is None or not self.config.prefix_caching:
            return
        num_full = num_tokens // self.config.block_size
        if sequence.is_encoder:  # whose last block never has more in it
            num_full = self.blocks_for(num_tokens)
        last = table[sequence.num_offered - 1] if sequence.num_offered and num_full > sequence.num_offered else None
        if last and last.key is None:
            sequence.num_expected = 0  # what is behind a withdrawn block is not found
            return
        for index in range(sequence.num_offered, num_full):
            if table[index]:
                self.name(table[index], self.key_of(sequence, index), pool)
            sequence.num_offered = index + 1

    def name(self, block: Block, key: Key | None, pool: str) -> None:
        if block.key is None and key:
            block.is_found = self.find(key, pool) is None
            block.key = key

    def reset_prefix_cache(self) -> int:
        """Returns the number of device blocks that were cached."""
        held = {pool: [block for table in self.tables(pool) for block in table if block] for pool in self.let_go}
        found = {b for b in held["device"] + self.let_go["device"] if b.key and b.is_found}
        for block in held["device"] + held["host"]:
            block.key = None
        self.let_go = {"device": [], "host": []}
        return len(found)

    def fork(self, parent: SlowSequence, child: SlowSequence, num_tokens: int) -> None:
        child.device = parent.device[: self.blocks_for(num_tokens)]
        child.computed = child.stored = num_tokens
        child.parent = parent
        child.num_offered = min(parent.num_offered, num_tokens // self.config.block_size)

    def planned(self, sequence: SlowSequence) -> int:
        """Tokens that the step computes of the sequence, as planned so far."""
        return sum(num_tokens for other, num_tokens, _ in self.plan if other is sequence)

    def num_new_blocks(
        self, chunks: list[tuple[SlowSequence, int]], moved: dict[SlowSequence, list[Block | None]] | None = None
    ) -> int:
        """Blocks to add, and a copy for every writer of a shared block but the last, tried on lists."""
        tables = {s: list(s.device or ()) for s in self.sequences()} | (moved or {})
        num_new = 0
        for sequence, num_tokens in chunks:
            if sequence.is_encoder:
                continue  # it has all of its blocks
            table = tables[sequence]
            end = self.blocks_for(sequence.computed + num_tokens + self.config.num_lookahead_slots)
            for index in range((sequence.computed + self.planned(sequence)) // self.config.block_size, end):
                if index >= len(table):
                    table.append(Block())
                    num_new += 1
                elif sum(table[index] in other for other in tables.values()) > 1:
                    table[index] = Block()
                    num_new += 1
        return num_new

    def append_slots(self, sequence: SlowSequence, num_tokens: int) -> int:
        """Returns the number of copies. An encoder's and planned tokens' blocks exist already."""
        if sequence.is_encoder:
            return 0
        num_copies, table = 0, sequence.device
        end = self.blocks_for(sequence.computed + num_tokens + self.config.num_lookahead_slots)
        for index in range((sequence.computed + self.planned(sequence)) // self.config.block_size, end):
            if index >= len(table):
                table.append(self.new_block("device"))
            elif self.holders(table[index]) > 1:
                table[index] = self.new_block("device")
                num_copies += 1
            else:
                table[index].key = None
        return num_copies

    def mode_for(self, group: SlowGroup) -> PreemptionMode:
        config = self.config
        contents = {block.key or block for s in group.live_and_encoder for block in s.device or () if block}
        num_taken = sum(self.find_content(content, "host") not in self.held("host") for content in contents)
        if config.preemption_mode is PreemptionMode.RECOMPUTE or num_taken > self.num_host_free:
            return PreemptionMode.RECOMPUTE
        copies, tokens = self.num_swap_copies(group), self.num_tokens_to_recompute(group)
        swap_speed, prefill_speed = config.swap_bytes_per_second, config.prefill_tokens_per_second
        swap = Fraction(copies * config.block_bytes, swap_speed) if swap_speed else inf
        recompute = Fraction(tokens, prefill_speed) if prefill_speed else inf if tokens else 0
        swaps = config.preemption_mode is PreemptionMode.SWAP or swap < recompute
        return PreemptionMode.SWAP if swaps else PreemptionMode.RECOMPUTE

    def find_content(self, content: Block | Key, pool: str) -> Block | None:
        return None if isinstance(content, Block) else self.find(content, pool)

    def num_swap_copies(self, group: SlowGroup) -> int:
        """Blocks to copy out that the host lacks, and those to copy back that no other group keeps."""
        num_copies, seen = 0, []
        for sequence in group.live_and_encoder:
            for block in (sequence.device or [])[: self.blocks_for(sequence.computed)]:
                content = block and (block.key or block)
                if block and content not in seen:
                    seen.append(content)
                    num_copies += self.find_content(content, "host") is None
                    num_copies += self.find_content(content, "device") not in self.held("device", but_by=[group])
        return num_copies

    def num_tokens_to_recompute(self, group: SlowGroup) -> int:
        leader, *followers = group.live
        kept = 0
        for index in range((len(leader.token_ids) - 1) // self.config.block_size if self.config.prefix_caching else 0):
            if self.find(self.key_of(leader, index)) not in self.held("device", but_by=[group]):
                break
            kept += self.config.block_size
        in_outputs = max(0, leader.computed - kept) + sum(max(0, f.computed - f.num_prompt_tokens) for f in followers)
        held, encoded = self.held("device", but_by=[group]), self.cached_encoder(group)
        if group.encoder is None or (encoded and all(block in held for block in encoded)):
            return in_outputs
        return in_outputs + group.encoder.computed

    def num_blocks_back(self, group: SlowGroup, *, alone: bool) -> int:
        """Free blocks that a swapped group needs to return and go on, alone or now."""
        back: dict[SlowSequence, list[Block | None]] = {}
        arrived: dict[Block | Key, Block] = {}
        for sequence in group.live_and_encoder:
            if sequence.host is not None:
                there = [block and (None if alone else self.find(block.key)) for block in sequence.host]
                pairs = zip(there, sequence.host, strict=True)
                back[sequence] = [t or (b and arrived.setdefault(b.key or b, b)) for t, b in pairs]
        there_already = set() if alone else self.held("device")
        num_back = len({block for table in back.values() for block in table} - {None} - there_already)
        chunks = [(sequence, min(sequence.uncomputed, self.config.max_num_batched_tokens)) for sequence in back]
        if alone:
            others = {sequence: [] for sequence in self.sequences() if sequence not in back}
            return num_back + self.num_new_blocks(chunks, back | others)
        return num_back + self.num_new_blocks(chunks, back)

    def move(self, group: SlowGroup, *, to_host: bool) -> int:
        """Returns the number of copied blocks: those with tokens that are not there already, each once."""
        source, target = ("device", "host") if to_host else ("host", "device")
        sequences = [sequence for sequence in group.live_and_encoder if getattr(sequence, source) is not None]
        for sequence in sequences:  # what is there is held before anything is given up for the rest
            there = [block and self.find(block.key, target) for block in getattr(sequence, source)]
            setattr(sequence, target, there)
            self.let_go[target] = [block for block in self.let_go[target] if block not in there]
        copy_of: dict[Block, Block] = {}
        num_copies = 0
        for sequence in sequences:
            table = getattr(sequence, target)
            for index, block in enumerate(getattr(sequence, source)):
                if block and table[index] is None:
                    table[index] = self.find(block.key, target) or copy_of.get(block)
                if block and table[index] is None:
                    table[index] = copy_of[block] = self.new_block(target)
                    self.name(copy_of[block], block.key, target)
                    num_copies += index < self.blocks_for(sequence.computed)
        for sequence in sequences:
            self.drop_blocks(sequence, pool=source)
            setattr(sequence, source, None)
            sequence.is_table_known = False
        return num_copies
