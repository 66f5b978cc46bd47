"""When a group that a worker has swapped out goes to another worker instead, to be computed there anew."""

from fake_worker import FakeWorker
from placement_helpers import add, answer, make_fleet, taken, unlike
from scheduler_helpers import step

from scheduler_service.core import PreemptionMode, Scheduler, SequenceGroup, SequenceStatus


def swapping_fleet() -> tuple[Scheduler, Scheduler, SequenceGroup]:
    """The first worker has swapped a group out and has no room to take it back in; the second one is free."""
    sizes: dict[str, object] = {
        "num_device_blocks": 8,
        "num_host_blocks": 16,
        "preemption_mode": PreemptionMode.SWAP,
        "max_model_len": 32,
        "prefill_tokens_per_second": 100,
    }
    full, free = fleet = make_fleet(2, **sizes)
    free.set_admission(False)
    groups = [unlike(name, 14, max_tokens=18) for name in "ab"]
    add(fleet, *groups)
    worker = FakeWorker(full.config)
    while not full.swapped:
        step(full, worker)
    free.set_admission(True)
    return full, free, groups[1]


def test_a_swapped_group_goes_where_it_is_computed_anew_sooner_than_it_has_waited() -> None:
    full, free, group = swapping_fleet()
    assert list(full.swapped) == [group]
    assert group.placement.swapped_at == 0.0
    output = full.schedule(1.0)
    assert not output.moved
    answer(full, output, 1.0)
    output = full.schedule(100.0)
    (placement,) = output.moved
    assert (placement.group, placement.to) == (group, free)
    assert placement.seconds_there < 100.0
    assert group.sequences[0].id == 0
    assert output.preempted
    assert not full.swapped
    assert full.blocks.host.num_free == full.config.num_host_blocks
    assert full.waiting.head is group
    assert full.balancer.num_moved == 1
    assert taken(free.schedule(100.0)) == [group.request_id]


def test_a_swapped_group_stays_while_there_is_no_better_place() -> None:
    full, free, group = swapping_fleet()
    free.set_admission(False)
    output = full.schedule(100.0)
    assert not output.moved
    assert group in full.swapped


def test_a_group_that_has_moved_must_have_waited_twice_as_long_to_move_again() -> None:
    full, free, group = swapping_fleet()
    group.placement.num_moves = 3
    (there, *_), *_ = full.balancer._others(full.member, group, 0.0, [free.member])
    answer(full, full.schedule(7.9 * there), 7.9 * there)
    assert group in full.swapped
    assert [placement.group for placement in full.schedule(8.1 * there).moved] == [group]
    assert group.placement.num_moves == 4


def test_a_swapped_group_that_is_aborted_after_it_moved_leaves_nothing_behind() -> None:
    full, free, group = swapping_fleet()
    full.schedule(100.0)
    free.finish_requests([group.request_id], SequenceStatus.FINISHED_ABORTED)
    assert group.is_finished
    assert group.request_id not in full.waiting
    full.blocks.check()
