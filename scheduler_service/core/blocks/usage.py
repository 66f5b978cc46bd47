"""Counts the blocks of each group of layers on demand, so that steps do not pay for it."""

from collections import Counter
from operator import itemgetter
from typing import NamedTuple

from scheduler_service.core.blocks.manager import BlockManager
from scheduler_service.core.blocks.prefix_cache import KEY_BYTES
from scheduler_service.core.blocks.tables import NO_BLOCK, Tables
from scheduler_service.core.config import LayerGroup

_number_in_tag = itemgetter(slice(KEY_BYTES, KEY_BYTES + 1))
"""The number of the group of layers in a block's key: nothing or one byte (see `PrefixCache._tags`)."""


class LayerGroupUsage(NamedTuple):
    layers: LayerGroup
    num_held: int
    """Device blocks that running sequences hold."""
    num_cached: int
    """Device blocks that only the prefix cache keeps, including states whose tokens are not known yet."""


def layer_group_usage(blocks: BlockManager) -> list[LayerGroupUsage]:
    """The usage of each group of layers. Between steps, the groups add up to the pool's counts. With several groups,
    this takes at most 0.2 µs for each entry of a block table and each cached block."""
    device, layers = blocks.device, [sizes.layers for sizes in blocks.sizes]
    num_state_groups = sum(group.has_states for group in layers)
    num_kept = len(blocks.states.held) // num_state_groups if num_state_groups else 0
    if len(layers) == 1:
        num_held = device.num_blocks - device.num_free - num_kept
        return [LayerGroupUsage(layers[0], num_held, len(device.cached) + num_kept)]
    by_tag = Counter(map(_number_in_tag, filter(None, map(device.key, device.cached))))
    by_tag[bytes([0])] += by_tag[b""]
    return [
        LayerGroupUsage(group, _num_held(tables), by_tag[bytes([number])] + num_kept * group.has_states)
        for number, (group, tables) in enumerate(zip(layers, blocks.all_tables, strict=True))
    ]


def _num_held(tables: Tables) -> int:
    """Different blocks in the tables of one group of layers."""
    return len(set[int]().union(*tables.values()) - {NO_BLOCK})
