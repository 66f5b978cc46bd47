"""For each group of layers, the blocks that sequences hold and the blocks that only the prefix cache keeps."""

import pytest
from fake_worker import FakeWorker
from scheduler_helpers import make_group, make_scheduler, step

from scheduler_service.core.blocks.tables import NO_BLOCK
from scheduler_service.core.blocks.usage import layer_group_usage
from scheduler_service.core.config import LayerGroup

LAYOUTS = [
    (LayerGroup(4),),
    (LayerGroup(0),),
    (LayerGroup(4), LayerGroup(2, window=5)),
    (LayerGroup(4), LayerGroup(4, 8, chunked=True), LayerGroup(0), LayerGroup(0)),
]


@pytest.mark.parametrize("layers", LAYOUTS, ids=str)
def test_each_block_of_the_pool_counts_for_the_group_of_layers_that_had_it_last(layers: tuple[LayerGroup, ...]) -> None:
    """The pool is so small that blocks move from one group of layers to another."""
    scheduler = make_scheduler(num_device_blocks=26, max_num_batched_tokens=16, layer_groups=layers)
    worker, device = FakeWorker(scheduler.config), scheduler.blocks.device
    for number in range(8):
        scheduler.add_request(make_group(str(number), 9 + 3 * number, root=bytes([number % 3]), max_tokens=9))
    had_last: dict[int, int] = {}
    most_cached = [0] * len(layers)
    while scheduler.has_work:
        step(scheduler, worker)
        by_group = [tables.values() for tables in scheduler.blocks.all_tables]
        in_tables = [{block for table in tables for block in table} - {NO_BLOCK} for tables in by_group]
        had_last |= {block: number for number, blocks in enumerate(in_tables) for block in blocks}
        kept = [*device.cached, *scheduler.blocks.states.held]
        cached = [sum(had_last[block] == number for block in kept) for number in range(len(layers))]
        assert layer_group_usage(scheduler.blocks) == [*zip(layers, map(len, in_tables), cached, strict=True)]
        most_cached = [*map(max, most_cached, cached)]
    assert all(most_cached)


def test_a_group_of_layers_is_named_by_what_it_keeps() -> None:
    groups = LayerGroup(4), LayerGroup(4, window=5), LayerGroup(4, 8, chunked=True), LayerGroup(0)
    assert [group.kind for group in groups] == ["full", "window 5", "chunk 8", "states"]
