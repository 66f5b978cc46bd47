"""The costs of preempting a group: blocks to swap out and in, or tokens to compute again."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from scheduler_service.core.blocks.allocator import BlockAllocator, Content
from scheduler_service.core.blocks.prefix_cache import PrefixCache
from scheduler_service.core.blocks.tables import NO_BLOCK, Pool, TableSizes
from scheduler_service.core.groups.sequence import SequenceGroup


class PreemptionCosts:
    def __init__(self, pool: Pool, host: BlockAllocator, cache: PrefixCache, sizes: SequenceOf[TableSizes]) -> None:
        """`pool`: the device's."""
        self._pool, self._device, self._host, self._cache, self._sizes = pool, pool.blocks, host, cache, sizes

    def num_swap_copies(self, group: SequenceGroup) -> int:
        """Number of block copies to swap a group out and in. Blocks that other groups hold on the device stay there."""
        pairs = zip(self._pool.tables_of(group), self._pool.contents(group), strict=True)
        filled = {c for (number, s, _), contents in pairs for c in contents[: self._sizes[number].filled(s)]}
        filled.discard(NO_BLOCK)
        find = self._find_of_others(group)
        num_out = sum(self._host.find(content) is None for content in filled)
        return num_out + sum(find(content) is None for content in filled)

    def num_tokens_to_recompute(self, group: SequenceGroup) -> int:
        """Computed tokens that a group would compute again: all behind the prefix whose blocks other groups hold, up to
        the last cached states. The group's own blocks count as evicted."""
        leader, *followers = group.live
        find = self._find_of_others(group)
        num_tokens = max(0, leader.num_computed_tokens - self._cache.num_kept_tokens(leader, find))
        if (encoder := group.encoder) is not None:
            # Without a prefix cache, the encoder's input has no keys.
            is_kept = bool(keys := encoder.block_keys) and all(find(key) is not None for key in keys)
            num_tokens += 0 if is_kept else encoder.num_computed_tokens
        return num_tokens + sum(max(0, f.num_computed_tokens - f.num_prompt_tokens) for f in followers)

    def _find_of_others(self, group: SequenceGroup) -> Callable[[Content], int | None]:
        """A function that finds a content's block if other groups hold it."""
        held, find, ref_count = self._pool.held_by(group), self._device.find, self._device.ref_count

        def find_of_others(content: Content) -> int | None:
            block = find(content)
            return block if block is not None and ref_count(block) > held[block] else None

        return find_of_others
