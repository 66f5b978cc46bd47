"""Prompts with items: no request finds another item's blocks, and a worker receives each item once."""

from fake_worker import FakeWorker, reference_output
from scheduler_helpers import make_group, make_item, make_scheduler, output_of, plan, run, step

from scheduler_service.core import PreemptionMode, SequenceGroup
from scheduler_service.core.planning.step import bytes_to_tell


def group_with(name: str, content: str, start: int = 5, num_embeddings: int = 6, **options: object) -> SequenceGroup:
    return make_group(name, 20, items=(make_item(content, start, num_embeddings),), **options)  # type: ignore[arg-type]


def test_equal_placeholders_find_only_the_blocks_of_equal_items() -> None:
    scheduler = make_scheduler(num_device_blocks=64)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(group_with("first", "a"))
    run(scheduler, worker)
    found = {}
    others = [group_with("equal", "a"), group_with("other", "b"), group_with("moved", "a", 6)]
    for group in (*others, make_group("plain", 20)):
        scheduler.add_request(group)
        run(scheduler, worker)
        found[group.request_id] = group.history.num_cached_tokens
        assert output_of(group) == reference_output(group, 0, 64)
    assert found == {"equal": 16, "other": 4, "moved": 4, "plain": 4}


def test_an_item_is_sent_once_a_session_whatever_becomes_of_its_groups() -> None:
    scheduler = make_scheduler(num_device_blocks=18, num_host_blocks=8, preemption_mode=PreemptionMode.RECOMPUTE)
    worker, groups, sent = FakeWorker(scheduler.config), [], []
    for number in range(3):
        groups.append(group_with(str(number), "ab"[number % 2], n=2, max_tokens=16, root=bytes([number])))
        scheduler.add_request(groups[-1])
    while scheduler.has_work:
        sent += [digest for new in step(scheduler, worker).new_sequences for digest in new.items_sent]
    assert scheduler.num_preemptions[PreemptionMode.RECOMPUTE]
    assert len(sent) == len(set(sent)) == 2
    for group in groups:
        assert [output_of(group, index) for index in range(2)] == [reference_output(group, i, 64) for i in range(2)]
    later = make_scheduler(scheduler.waiting, num_device_blocks=18)
    scheduler.release_all()
    later.add_request(group_with("later", "a"))
    assert [len(new.items_sent) for new in later.schedule().new_sequences] == [1]


def test_an_item_whose_tokens_are_cached_is_not_sent() -> None:
    scheduler = make_scheduler(num_device_blocks=64)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(group_with("first", "a"))
    run(scheduler, worker)
    worker.items.clear()  # of which a needed one would be missed
    scheduler.add_request(group_with("equal", "a"))
    scheduler._writer._items.__init__()  # type: ignore[misc]  # nor does the scheduler know it
    assert [new.items_sent for new in step(scheduler, worker).new_sequences] == [frozenset()]


def test_the_bytes_of_items_count_in_a_step() -> None:
    small = bytes_to_tell(group_with("a", "a").sequences[0], 5)
    large = make_group("b", 20, items=(make_item("b", 5, 6, 10_000),))
    assert bytes_to_tell(large.sequences[0], 5) == small + 9_900
    scheduler = make_scheduler(num_device_blocks=64, max_step_bytes=12_000)
    worker = FakeWorker(scheduler.config)
    for number in range(3):
        scheduler.add_request(make_group(str(number), 20, items=(make_item(str(number), 5, 6, 10_000),)))
    assert [plan(step(scheduler, worker)).get("2", []) for _ in range(2)] == [[], [16]]  # one block is cached
