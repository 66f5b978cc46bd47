"""Blocks with states: layers of linear attention, state spaces and short convolutions keep no keys and values.

A group of layers with states has one block for each sequence, with the states after all computed tokens. Each further
token changes this block, so a cached prefix is found only where a block was kept and its sequence continued in a copy:

- at the last block border of a prompt;
- at the block border where other requests are known to continue differently, as in Marconi (Pan et al., 2025);
- at block borders of an output, every `OUTPUT_SPACING` tokens or at each border of larger blocks, for a conversation's
  next turn. Newer states of an output replace older states.

A chunk ends at a border where states will be kept. States are kept only if free blocks are left above the watermark. A
waiting sequence can tell a running one to keep the states where the two divide, and waits for them.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from scheduler_service.core.blocks.allocator import BlockAllocator
from scheduler_service.core.blocks.prefix_cache import CachedPrefix, PrefixCache, PrefixLook
from scheduler_service.core.blocks.tables import Tables
from scheduler_service.core.groups.sequence import Sequence

OUTPUT_SPACING = 64
"""Tokens. If states were kept every 16 tokens, a step of 256 sequences would take 1.6 times as long to plan."""


class StateBlocks:
    """The blocks of the groups of layers with states. `groups`: each group's tables, and how many entries of each table
    the worker knows."""

    def __init__(
        self,
        device: BlockAllocator,
        cache: PrefixCache,
        groups: SequenceOf[tuple[Tables, dict[int, int]]],
        num_watermark_blocks: int,
    ) -> None:
        self._device, self._cache, self._groups = device, cache, groups
        self._num_watermark_blocks = num_watermark_blocks
        # Found blocks that sequences left in this step. The step's swaps must not overwrite them before the step copies
        # them.
        self._left: list[int] = []
        # For each sequence: the number of tokens before its kept blocks, and the blocks. Their key waits until these
        # tokens are known.
        self._kept: dict[Sequence, tuple[int, list[int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def end_of_chunk(self, sequence: Sequence, end: int) -> int:
        """The end, in tokens, of a chunk that could extend to `end`."""
        start = sequence.num_computed_tokens
        return min([stop for stop in self._stops(sequence) if start < stop < end], default=end)

    def _stops(self, sequence: Sequence) -> Iterator[int]:
        if sequence.group.has_unforked and len(sequence.group.live) > 1:
            yield sequence.num_prompt_tokens - 1
        if num_blocks := self._cache.keys.num_cacheable(sequence):
            yield num_blocks * self._cache.block_size
            yield sequence.num_shared_tokens

    def next_border(self, num_tokens: int) -> int:
        """The first border at or after `num_tokens` tokens."""
        return -(-num_tokens // self._cache.block_size) * self._cache.block_size

    def blocks_of(self, sequence: Sequence) -> list[int]:
        return [tables[sequence.id][0] for tables, _ in self._groups]

    def keep(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Keep a scheduled sequence's blocks for the cache, if they were found there or belong there, and let the
        sequence continue in copies. Returns pairs of source and target block."""
        start, blocks = sequence.num_computed_tokens, self.blocks_of(sequence)
        is_found = self._device.key(blocks[0]) is not None
        if not is_found and not (self._belongs(sequence, start) and sequence not in self._kept):
            return []
        if self._device.num_free - len(blocks) < self._num_watermark_blocks:
            for block in blocks:
                if self._device.ref_count(block) == 1:
                    self._device.withdraw(block)
            return []
        for tables, known in self._groups:
            tables[sequence.id][0] = self._device.allocate()
            known.pop(sequence.id, None)
        if is_found:
            self._left += blocks
        else:
            self._kept[sequence] = start, blocks
        return [*zip(blocks, self.blocks_of(sequence), strict=True)]

    def _belongs(self, sequence: Sequence, start: int) -> bool:
        """Whether to keep the states that a sequence has after its first `start` tokens."""
        if not start or start % self._cache.block_size or not self._cache.keys.caches(sequence):
            return False
        if start == sequence.num_shared_tokens:
            return True
        place = start // self._cache.block_size
        if start < sequence.num_prompt_tokens or sequence.num_uncomputed_tokens > 1:
            return place == self._cache.keys.num_cacheable(sequence)
        return place % max(1, OUTPUT_SPACING // self._cache.block_size) == 0

    def await_prefix(self, waiting: Sequence, computing: Iterable[tuple[Sequence, int]]) -> PrefixLook:
        """The longest prefix of a waiting sequence whose states will be kept by a running one. `computing`: sequences
        that compute prompts, each with its number of computed tokens after this step. One of them can be told to
        keep states where the two divide."""
        end_of, leading = self._cache.keys.num_cacheable, self._cache.keys.leading  # copying keys would be slow
        num_looked_up = max(0, end_of(waiting) - len(waiting.block_keys))  # a hash takes longer than a lookup
        keys = leading(waiting, end_of(waiting))
        longest, keeper = 0, None
        for other, num_planned in computing:
            others = leading(other, end_of(other))
            common = range(longest, min(end_of(waiting), end_of(other)))
            end = longest + bisect_left(common, True, key=lambda place: keys[place] != others[place])
            num_looked_up += len(common).bit_length()
            if end > longest and self._will_keep(other, end * self._cache.block_size, num_planned):
                longest, keeper = end, other
        if keeper is None:
            return PrefixLook(0, None, num_looked_up)
        # Looking up all blocks of a prompt takes long, so the states come first.
        if longest <= self._cache.last_states(keys, end_of(waiting)) and (
            longest * self._cache.block_size <= self._cache.cached(waiting).num_tokens
        ):
            return PrefixLook(0, None, num_looked_up + longest)
        if _is_free(keeper):
            keeper.num_shared_tokens = longest * self._cache.block_size
        return PrefixLook(longest, keys[longest - 1], num_looked_up)

    def _will_keep(self, sequence: Sequence, num_tokens: int, num_planned: int) -> bool:
        """Whether a sequence will keep the states after its first `num_tokens` tokens, or can still be told to keep
        them."""
        if sequence in self._kept and self._kept[sequence][0] == num_tokens:
            return True
        if sequence.num_computed_tokens == num_tokens:
            return num_tokens in self._stops(sequence)
        return num_planned <= num_tokens and (_is_free(sequence) or num_tokens in self._stops(sequence))

    @property
    def keeping(self) -> Collection[Sequence]:
        """Sequences whose kept blocks have no key yet."""
        return self._kept

    def planned(self) -> None:
        """After a step's plan, free the blocks that its sequences left, and publish the kept blocks of known tokens.
        Only later steps find them: within a step, all states are computed at once."""
        for block in self._left:
            self._device.free(block)
        self._left.clear()
        self.settle()

    def settle(self) -> None:
        """Publish the kept blocks of known tokens."""
        for sequence in [one for one, (num_tokens, _) in self._kept.items() if one.num_stored_tokens >= num_tokens]:
            self._release(sequence)

    def leave(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        """Forget a sequence that leaves the worker. `is_sound`: whether its states can be trusted."""
        if sequence in self._kept:
            self._release(sequence, is_sound=is_sound)

    def outlive(self, sequence: Sequence) -> None:
        """Call after a sequence's blocks are freed. Its last kept states, and the states at the end of the prefix that
        it found cached, are then evicted no earlier than its blocks."""
        for num_tokens in (sequence.num_shared_tokens, sequence.num_kept_tokens or sequence.num_prompt_tokens - 1):
            for block in self._cache.free_states(sequence, num_tokens):
                self._device.share(block)
                self._device.free(block)

    def late(self, sequence: Sequence) -> None:
        """Forget states that a step in flight keeps: the late token has not changed them yet."""
        if sequence in self._kept and self._kept[sequence][0] > sequence.num_stored_tokens:
            self._release(sequence, is_sound=False)

    def forget_kept(self) -> None:
        """Free all kept blocks without publishing them."""
        for sequence in [*self._kept]:
            self._release(sequence, is_sound=False)

    def of(self, cached: CachedPrefix) -> list[int]:
        """The blocks with states among the cached blocks of a prefix."""
        tables = cached.tables[-len(self._groups) :]
        return [block for table in tables for block in table]

    def _release(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        num_tokens, blocks = self._kept.pop(sequence)
        is_published = is_sound and sequence.num_stored_tokens >= num_tokens
        if is_published:
            self._cache.publish_states(sequence, num_tokens, blocks)
        for block in blocks:
            self._device.free(block)
        if is_published and num_tokens > sequence.num_prompt_tokens:
            for block in self._cache.free_states(sequence, sequence.num_kept_tokens):
                self._device.withdraw(block)
            sequence.num_kept_tokens = num_tokens

    @property
    def held(self) -> list[int]:
        """Blocks that are held without being in a table."""
        return self._left + [block for _, blocks in self._kept.values() for block in blocks]


def _is_free(sequence: Sequence) -> bool:
    """Whether a waiting sequence may choose where this sequence keeps states."""
    return not sequence.num_shared_tokens or sequence.num_shared_tokens < sequence.num_computed_tokens
