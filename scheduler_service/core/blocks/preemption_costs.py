"""The costs of preempting a group: blocks to swap out and in, or tokens to compute again."""

import itertools
from collections import Counter
from collections.abc import Sequence as SequenceOf

from scheduler_service.core.blocks.allocator import BlockAllocator, Content
from scheduler_service.core.blocks.prefix_cache import PrefixCache
from scheduler_service.core.blocks.tables import NO_BLOCK, Pool, TableSizes
from scheduler_service.core.groups.sequence import SequenceGroup


class PreemptionCosts:
    def __init__(self, pool: Pool, host: BlockAllocator, cache: PrefixCache, sizes: SequenceOf[TableSizes]) -> None:
        """`pool`: the device's."""
        self._pool, self._device, self._host, self._cache, self._sizes = pool, pool.blocks, host, cache, sizes
        self._has_states = any(one.layers.has_states for one in sizes)

    def num_swap_copies(self, group: SequenceGroup) -> int:
        """Number of block copies to swap a group out and in. Blocks that other groups hold on the device stay there."""
        pairs = zip(self._pool.tables_of(group), self._pool.contents(group), strict=True)
        filled = {c for (number, s, _), contents in pairs for c in contents[: self._sizes[number].filled(s)]}
        filled.discard(NO_BLOCK)
        held = self._pool.held_by(group)
        num_out = sum(self._host.find(content) is None for content in filled)
        return num_out + sum(not self._is_held_by_others(content, held) for content in filled)

    def num_tokens_to_recompute(self, group: SequenceGroup) -> int:
        """Computed tokens that a group would compute again: all except those in blocks of other groups."""
        leader, *followers = group.live
        held = self._pool.held_by(group)
        keys = [] if self._has_states else self._cache.keys.cacheable(leader)
        kept = itertools.takewhile(lambda key: self._is_held_by_others(key, held), keys)
        num_tokens = max(0, leader.num_computed_tokens - sum(self._cache.block_size for _ in kept))
        if (encoder := group.encoder) is not None:
            # Without a prefix cache, the encoder's input has no keys.
            is_kept = bool(keys := encoder.block_keys) and all(self._is_held_by_others(key, held) for key in keys)
            num_tokens += 0 if is_kept else encoder.num_computed_tokens
        return num_tokens + sum(max(0, f.num_computed_tokens - f.num_prompt_tokens) for f in followers)

    def _is_held_by_others(self, content: Content, held: Counter[int]) -> bool:
        block = self._device.find(content)
        return block is not None and self._device.ref_count(block) > held[block]
