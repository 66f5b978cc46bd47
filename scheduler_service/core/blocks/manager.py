"""Block tables: the blocks of each sequence on the device or the host, in the order of positions.

Each group of layers has a table of its own (hybrid KV caches, as in vLLM): layers with a sliding window free the blocks
behind the window, and other layers keep all. All tables take their blocks from one pool. A table covers at least the
computed tokens. A sequence receives a copy of a shared block before it writes to the block (copy on write). The
encoder's input of a group has a separate table, for cross attention: see groups/encoder_input.py.

Blocks that a swap copies can be found as soon as the swap is planned. Every step copies blocks before attention reads
them, and steps are done in order.
"""

import enum
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from scheduler_service.core.blocks.allocator import BlockAllocator, Content, PrefixDirectory
from scheduler_service.core.blocks.preemption_costs import PreemptionCosts
from scheduler_service.core.blocks.prefix_cache import PrefixCache
from scheduler_service.core.blocks.states import StateBlocks
from scheduler_service.core.blocks.tables import NO_BLOCK, Pool, TableSizes, move, own_contents
from scheduler_service.core.config import LayerGroup
from scheduler_service.core.groups.sequence import EncoderSequence, Sequence, SequenceGroup


class AllocStatus(enum.Enum):
    """Whether a waiting group's blocks can be allocated: now, later, or never in this pool."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class BlockManager:
    def __init__(
        self,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int = 0,
        watermark: float = 0.0,
        *,
        prefix_caching: bool = False,
        num_lookahead_slots: int = 0,
        layer_groups: SequenceOf[LayerGroup] = (),
        max_chunk: int = 0,
        max_sequence_tokens: int | None = None,
        directory: PrefixDirectory | None = None,
        bit: int = 1,
    ) -> None:
        """`block_size`: a multiple of each group's, and by default the only group's. `max_chunk`: tokens of the largest
        chunk. The first group has no window, if any has none."""
        groups = layer_groups or (LayerGroup(block_size),)
        chunk = max_chunk + num_lookahead_slots
        has_states = any(group.has_states for group in groups)
        self.sizes = [
            TableSizes(group, group.room, num_device_blocks, num_lookahead_slots, chunk, has_states) for group in groups
        ]
        self.block_size = block_size
        self.max_sequence_tokens = max_sequence_tokens or num_device_blocks * block_size - num_lookahead_slots
        self.device = BlockAllocator(num_device_blocks, directory, bit)
        self.host = BlockAllocator(num_host_blocks)
        self.num_watermark_blocks = int(watermark * num_device_blocks)
        self._on_device, self._on_host = Pool(self.device, len(groups)), Pool(self.host, len(groups))
        self.cache = PrefixCache(
            self._on_device, self._on_host, self.sizes, block_size=block_size, prefix_caching=prefix_caching
        )
        self.tables, self.all_tables = self._on_device.tables, self._on_device.all_tables
        self.host_tables, self.all_host_tables = self._on_host.tables, self._on_host.all_tables
        self._num_known: list[dict[int, int]] = [{} for _ in groups]  # leading table entries that the worker knows
        # Every step reads these together: number, sizes, device tables and known entries of each group of layers.
        self._layers = [*zip(itertools.count(), self.sizes, self.all_tables, self._num_known, strict=False)]
        self._windows = [(sizes.layers, tables) for _, sizes, tables, _ in self._layers if sizes.layers.window]
        own = [(tables, known) for _, sizes, tables, known in self._layers if sizes.layers.has_states]
        self.states = StateBlocks(self.device, self.cache, own, self.num_watermark_blocks)
        self._on_device.held = lambda: self.states.held
        self.costs = PreemptionCosts(self._on_device, self.host, self.cache, self.sizes)

    # ---- sizes

    def num_table_entries(self, sequence: Sequence, num_tokens: int) -> int:
        """Entries of a sequence's tables with room for `num_tokens` more tokens."""
        num_tokens += sequence.num_computed_tokens
        return sum(
            [max(sizes.blocks_ahead(num_tokens), len(tables[sequence.id])) for _, sizes, tables, _ in self._layers]
        )

    def num_new_entries(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a sequence lacks for `num_tokens` more tokens."""
        num_tokens += sequence.num_computed_tokens
        lacking = [sizes.blocks_ahead(num_tokens) - len(tables[sequence.id]) for _, sizes, tables, _ in self._layers]
        return sum([number for number in lacking if number > 0])

    def num_blocks_of(self, group: SequenceGroup) -> int:
        """Blocks for a waiting group's present tokens."""
        return sum([sizes.blocks_of_group(group) for sizes in self.sizes])

    def never_fits(self, group: SequenceGroup) -> bool:
        """Whether a waiting group with outputs of maximum length needs more than the whole pool."""
        if not self.device.num_blocks:
            return len(group.prompt_token_ids) > self.max_sequence_tokens
        most = sum([sizes.most_blocks_of_group(group, self.max_sequence_tokens) for sizes in self.sizes])
        return most > self.device.num_blocks

    def blocks_of(self, sequence: Sequence) -> Iterator[int]:
        """The device blocks of a sequence in all groups of layers."""
        return self._on_device.blocks_of(sequence.id)

    # ---- what the worker knows

    def is_told(self, sequence: Sequence) -> bool:
        """Whether the worker knows any entry of the sequence's tables."""
        return bool(self._num_known[0].get(sequence.id))

    def tell(self, sequence: Sequence, *, whole: bool) -> list[tuple[int, int, list[int]]]:
        """The parts of a sequence's tables that the worker does not know, or all: group of layers, first entry,
        entries. Afterwards they count as known."""
        parts = []
        for number, _, tables, known in self._layers:
            if (table := tables.get(sequence.id)) is not None:
                start = 0 if whole else known.get(sequence.id, 0)
                if whole or start < len(table):
                    parts.append((number, start, table[start:]))
                    known[sequence.id] = len(table)
        return parts

    # ---- allocation

    def can_allocate(
        self, group: SequenceGroup, *, leave_watermark: bool, without: Iterable[SequenceGroup] = ()
    ) -> AllocStatus:
        """Whether the device has blocks for a waiting group after the groups in `without` have left. The watermark
        keeps a reserve free, so that running groups can grow."""
        if self.never_fits(group):
            return AllocStatus.NEVER
        leaving = Counter(itertools.chain(*map(self._on_device.held_by_each, without)))
        del leaving[NO_BLOCK]
        num_free = self.device.num_free + sum(self.device.ref_count(b) == n for b, n in leaving.items())
        leader = group.live[0]
        cached = self.cache.cached(leader)
        # A cached block with a holder needs no free block, unless it has states, which the sequence copies.
        num_copied = 0 if not self.states else self.device.num_held(self.states.of(cached), leaving)
        needed = self.num_blocks_of(group) - self.device.num_held(cached.blocks, leaving) + num_copied
        if cached.num_tokens and self._windows:
            for sizes in self.sizes:
                needed += sizes.first_blocks(leader, cached.num_tokens) - sizes.first_blocks(leader)
                needed -= sizes.layers.first_needed(cached.num_tokens)
        if group.encoder is not None:
            needed -= self.device.num_held(self.cache.cached_encoder_blocks(group.encoder), leaving)
        reserve = self.num_watermark_blocks if leave_watermark else 0
        return AllocStatus.OK if needed + reserve <= num_free else AllocStatus.LATER

    def allocate(self, leader: Sequence) -> None:
        """Allocate the first blocks of a sequence and of its encoder's input. Tokens in cached blocks count as
        computed."""
        assert leader.id not in self.tables
        cached, encoder = self.cache.cached(leader), leader.group.encoder
        cross_table = [] if encoder is None else self.cache.cached_encoder_blocks(encoder)
        for block in itertools.chain(cached.blocks, cross_table):
            self.device.share(block)
        if encoder is not None:
            self._allocate_encoder(encoder, cross_table)
        leader.num_computed_tokens = leader.num_stored_tokens = cached.num_tokens
        leader.num_shared_tokens = cached.num_shared_tokens
        leader.num_published_blocks = cached.num_tokens // self.block_size
        for sizes, tables, table in zip(self.sizes, self.all_tables, cached.tables, strict=True):
            num_entries = sizes.first_blocks(leader, cached.num_tokens)
            table.extend(self.device.allocate() for _ in range(num_entries - len(table)))
            tables[leader.id] = table
        self._count_slots(leader, leader.num_tokens)

    def _count_slots(self, sequence: Sequence, num_tokens: int) -> None:
        """Count the slots of tables that cover `num_tokens` tokens."""
        sequence.num_slots = min([sizes.slots(len(tables[sequence.id])) for _, sizes, tables, _ in self._layers])
        if self.states:
            sequence.num_slots = min(sequence.num_slots, self.states.next_border(num_tokens))

    def _allocate_encoder(self, encoder: EncoderSequence, cached: list[int]) -> None:
        if cached:
            encoder.num_computed_tokens = encoder.num_stored_tokens = encoder.num_prompt_tokens
            encoder.num_published_blocks = len(cached)
        num_blocks = self.sizes[0].blocks_of(encoder.num_prompt_tokens)
        self.tables[encoder.id] = cached or [self.device.allocate() for _ in range(num_blocks)]

    def shares_any(self, group: SequenceGroup, blocks: Container[int]) -> bool:
        held = self._on_device.held_by(group)
        return any(block in blocks and self.device.ref_count(block) > count for block, count in held.items())

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let a sequence without a table share the blocks of the parent's first `num_tokens` tokens."""
        assert child.id not in self.tables
        for sizes, tables in zip(self.sizes, self.all_tables, strict=True):
            tables[child.id] = tables[parent.id][: sizes.blocks_of(num_tokens)]
        for block in self.blocks_of(child):
            self.device.share(block)
        if not child.block_keys:
            child.block_keys = parent.block_keys[: num_tokens // self.block_size]
        child.forked_from = parent
        child.num_computed_tokens = child.num_stored_tokens = num_tokens
        self._count_slots(child, num_tokens)
        self.cache.forked(parent, child)
        child.num_published_blocks = min(parent.num_published_blocks, num_tokens // self.block_size)

    def release_behind_window(self, sequence: Sequence) -> None:
        """Free the blocks that no later token attends to, and note when the next block will be one of them."""
        if sequence.id not in self.tables:
            return  # it has ended, or not forked yet
        num_certain = sequence.num_computed_tokens - sequence.num_draft_tokens  # drafts may be rejected
        if sequence.sampling.form:
            num_certain = sequence.num_stored_tokens  # a late sequence computes its last token again
        releases_at = sys.maxsize
        for layers, tables in self._windows:
            table, first_needed = tables[sequence.id], layers.first_needed(num_certain)
            for index in range(first_needed - 1, -1, -1):
                if table[index] == NO_BLOCK:
                    break  # earlier blocks are free already
                self.device.free(table[index])
                table[index] = NO_BLOCK
            releases_at = min(releases_at, layers.released_at(first_needed))
        sequence.releases_at = releases_at

    def can_append_slots(self, chunks: Iterable[tuple[Sequence, int]]) -> bool:
        return self._num_new_blocks(chunks, self.all_tables, self.device.ref_count) <= self.device.num_free

    def append_slots(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Give a sequence room for `num_tokens` tokens in blocks of its own. Returns pairs of source and target to
        copy."""
        copies: list[tuple[int, int]] = []
        start, device = sequence.num_computed_tokens, self.device
        for _, sizes, tables, known in self._layers:
            table, first = tables[sequence.id], start // sizes.block_size
            if first >= len(table):
                continue
            for index in range(first, min(sizes.blocks_ahead(start + num_tokens), len(table))):
                block = table[index]
                if device.ref_count(block) > 1:
                    table[index] = device.allocate()
                    device.free(block)
                    copies.append((block, table[index]))
                    known[sequence.id] = min(known.get(sequence.id, 0), index)
                elif not sizes.layers.has_states:
                    # The block may have been published with the parent's tokens.
                    device.withdraw(block)
        self._extend_tables(sequence, start + num_tokens)
        return copies

    def extend_slots(self, sequence: Sequence, num_tokens: int) -> bool:
        """After `append_slots`, extend the room to `num_tokens` tokens. Returns whether enough blocks were free."""
        if self.num_new_entries(sequence, num_tokens) > self.device.num_free:
            return False
        self._extend_tables(sequence, sequence.num_computed_tokens + num_tokens)
        return True

    def _extend_tables(self, sequence: Sequence, num_tokens: int) -> None:
        """Let the tables cover a sequence's first tokens, and count the slots."""
        num_slots = self.states.next_border(num_tokens) if self.states else sys.maxsize
        for _, sizes, tables, _ in self._layers:
            table = tables[sequence.id]
            for _ in range(sizes.blocks_ahead(num_tokens) - len(table)):
                table.append(self.device.allocate())
            if (slots := sizes.slots(len(table))) < num_slots:
                num_slots = slots
        sequence.num_slots = num_slots

    def _num_new_blocks(
        self,
        chunks: Iterable[tuple[Sequence, int]],
        all_tables: Iterable[Mapping[int, SequenceOf[Content]]],
        num_holders: Callable[[Any], int],
    ) -> int:
        """Free blocks that these chunks need: new blocks, and copies of shared blocks. `all_tables`: for each group of
        layers, by sequence id."""
        num_new, chunks = 0, [*chunks]
        writers: Counter[Content] = Counter()  # number of writers of each shared block
        for sizes, tables in zip(self.sizes, all_tables, strict=True):
            for sequence, num_tokens in chunks:
                table = tables[sequence.id]
                end = sizes.blocks_ahead(sequence.num_computed_tokens + num_tokens)
                num_new += max(0, end - len(table))
                for block in table[sequence.num_computed_tokens // sizes.block_size : end]:
                    if num_holders(block) > 1:
                        writers[block] += 1
        # The last writer is the only holder by then, and needs no copy.
        return num_new + sum(min(count, num_holders(block) - 1) for block, count in writers.items())

    # ---- swapping

    def can_swap_out(self, group: SequenceGroup) -> bool:
        """Whether host memory has room for a running group's blocks that it does not have already."""
        own = own_contents(self._on_device.contents(group))
        return self.host.num_taken(own) <= self.host.num_free

    def swap_out(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Move a group's tables to host blocks. Returns pairs of device and host block to copy."""
        for sequence in group.live:
            self.cache.unexpect(sequence, sequence.num_expected_blocks)
        return move(group, self._on_device, self._on_host, self.sizes)

    def can_swap_in(self, group: SequenceGroup, step_tokens: int, *, leave_watermark: bool) -> AllocStatus:
        """Whether a swapped group fits the device, with room for the tokens of its next step, at most `step_tokens`.
        With a sliding window, a whole prompt can be larger than the pool."""
        contents = self._on_host.contents(group)
        own = own_contents(contents)
        tables: list[dict[int, list[Content]]] = [{} for _ in self.sizes]
        for (number, sequence, _), its_contents in zip(self._on_host.tables_of(group), contents, strict=True):
            tables[number][sequence.id] = its_contents
        next_tokens = [(s, min(s.num_uncomputed_tokens, step_tokens)) for s in group.live if s.id in tables[0]]
        if len(own) + self._num_new_blocks(next_tokens, tables, own.__getitem__) > self.device.num_blocks:
            return AllocStatus.NEVER
        needed = self.device.num_taken(own)
        needed += self._num_new_blocks(next_tokens, tables, lambda c: own[c] + self.device.num_holders(c))
        reserve = self.num_watermark_blocks if leave_watermark else 0
        return AllocStatus.OK if needed + reserve <= self.device.num_free else AllocStatus.LATER

    def swap_in(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Move a group's tables to device blocks. Returns pairs of host and device block to copy."""
        for sequence in group.with_tables:
            for known in self._num_known:
                known.pop(sequence.id, None)
        return move(group, self._on_host, self._on_device, self.sizes)

    # ---- freeing

    def withdraw(self, sequence: Sequence) -> None:
        """Remove a sequence's blocks from the prefix cache, because their contents cannot be trusted."""
        self.states.leave(sequence, is_sound=False)
        self.cache.withdraw(sequence)

    def reset_prefix_cache(self) -> int:
        self.states.forget_kept()
        return self.cache.reset()

    def free(self, sequence: Sequence) -> None:
        self.states.leave(sequence)
        self.cache.leave(sequence)
        self.cache.unexpect(sequence, sequence.num_expected_blocks)
        for pool in (self._on_device, self._on_host):
            pool.free(sequence.id)
        for known in self._num_known:
            known.pop(sequence.id, None)
        if self.states:
            self.states.outlive(sequence)

    def check(self) -> None:
        """Assert on both pools that free + held = total and that reference counts equal the tables."""
        self._on_device.check()
        self._on_host.check()
