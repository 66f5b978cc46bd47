"""Steps for workers with several groups of layers, made of steps with one block table for each sequence.

Block `b` of the given tables becomes block `b * groups + group` of a group. Given blocks have `LIMITS.block_size`
tokens, blocks of a group maybe more.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace

from worker_service.execution.cache.cache_engine import CacheEngine
from worker_service.models.causal_model import GroupedCache
from worker_service.session.step import TOKENS, BlockMapping, BlockTableUpdate, Limits, SchedulerOutput, Tables


class GroupedSteps:
    def __init__(self, engine: CacheEngine, limits: Limits) -> None:
        """limits: those of the given steps."""
        cache = engine.cache
        is_grouped = isinstance(cache, GroupedCache) and not limits.layer_groups
        self._sizes: Sequence[int] = cache.block_sizes if is_grouped and isinstance(cache, GroupedCache) else ()
        self._block_size = limits.block_size

    def of(self, step: SchedulerOutput) -> SchedulerOutput:
        if not self._sizes:
            return step
        new = []
        for one in step.new_sequences:
            first, *further = self._tables(one.block_ids)
            new.append(replace(one, block_ids=first, further_tables=tuple(further)))
        assert not step.forks
        updates = []
        for update in step.block_table_updates:
            assert update.start == 0
            for group, table in enumerate(self._tables(update.block_ids)):
                updates.append(BlockTableUpdate(update.sequence_id, 0, table, group))
        return replace(
            step,
            new_sequences=tuple(new),
            block_table_updates=tuple(updates),
            blocks_to_swap_out=self._mapping(step.blocks_to_swap_out),
            blocks_to_swap_in=self._mapping(step.blocks_to_swap_in),
            blocks_to_copy=self._mapping(step.blocks_to_copy),
        )

    def _tables(self, block_ids: "array[int]") -> Tables:
        """Each group's table. A group's block begins in one of the given blocks and has its number."""
        num_tokens, tables = len(block_ids) * self._block_size, []
        for group, size in enumerate(self._sizes):
            firsts = range(0, num_tokens, size) if size else range(1)
            blocks = [block_ids[first // self._block_size] * len(self._sizes) + group for first in firsts]
            tables.append(array(TOKENS, blocks))
        return tuple(tables)

    def _mapping(self, blocks: BlockMapping) -> BlockMapping:
        def each(numbers: Sequence[int]) -> tuple[int, ...]:
            return tuple(number * len(self._sizes) + group for number in numbers for group in range(len(self._sizes)))

        return BlockMapping(each(blocks.sources), each(blocks.destinations))
