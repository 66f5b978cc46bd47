"""Which block keys name an item, and how long a worker keeps items."""

import gc
import sys

from scheduler_helpers import make_group, make_item

from scheduler_service.core.groups.prompt_item import WorkerItems, key_of_items

ITEMS = (make_item("a", 3, 2), make_item("b", 5, 10), make_item("c", 20, 1))


def test_a_blocks_key_names_the_items_that_begin_in_the_block_and_their_places() -> None:
    keys = [key_of_items(ITEMS, start, start + 4) for start in range(0, 24, 4)]
    assert [len(key) // 40 for key in keys] == [1, 1, 0, 0, 0, 1]
    assert keys[0].startswith(ITEMS[0].digest)
    assert keys[0] != key_of_items((make_item("a", 2, 2),), 0, 4)


def test_an_item_is_missing_once_however_many_groups_use_it() -> None:
    items, twice = WorkerItems(), (*ITEMS, make_item("a", 30, 2))
    assert items.hold("first", twice) == {item.digest for item in ITEMS}
    assert items.hold("first", twice) == items.hold("second", ITEMS) == set()
    for group in ("first", "second", "second"):
        items.release(group)
    assert items.hold("third", ITEMS) == items.hold("fourth", ITEMS) == set()
    assert items.take_dropped() == []


def test_without_room_the_items_that_were_used_longest_ago_are_dropped_but_none_of_a_group_in_flight() -> None:
    items = WorkerItems(most_kept=250)
    for group, item in zip("abc", ITEMS, strict=True):
        items.hold(group, [item])
    for group in "bac":
        items.release(group)
    assert items.take_dropped() == [ITEMS[1].digest]
    items.hold("in flight", [ITEMS[0]])
    items.hold("large", [make_item("large", 0, 1, 1000)])
    items.release("large")
    assert items.take_dropped() == [ITEMS[2].digest, make_item("large", 0, 1).digest]
    assert items.hold("again", ITEMS) == {ITEMS[1].digest, ITEMS[2].digest}


def test_the_data_of_a_group_that_is_disbanded_is_freed_at_once() -> None:
    data = bytes(1000)
    gc.disable()
    try:
        before = sys.getrefcount(data)
        group = make_group("a", 1, items=(make_item("a", 0, 1)._replace(data=data),))
        group.disband()
        assert sys.getrefcount(data) == before
    finally:
        gc.enable()
