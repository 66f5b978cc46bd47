"""What becomes of groups whose worker is lost or drained."""

import pytest
from fake_worker import FakeWorker, reference_output
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run, step

from scheduler_service.core import PriorityQueue, Scheduler, SequenceGroup, SequenceStatus, WaitingQueue


def test_a_lost_worker_gives_its_groups_back_in_order_and_another_goes_on_from_their_tokens() -> None:
    waiting = WaitingQueue()
    first = make_scheduler(waiting)
    groups = [make_group(name, 6, n=n, max_tokens=6) for name, n in (("a", 1), ("b", 2), ("c", 1))]
    for group in groups:
        first.add_request(group)
    worker = FakeWorker(first.config)
    for _ in range(3):
        step(first, worker)
    first.release_all()
    assert list(waiting) == groups
    assert first.blocks.device.num_free == 16
    second = make_scheduler(waiting)
    run(second, FakeWorker(second.config))
    for group in groups:
        for index in range(group.sampling.n):
            assert output_of(group, index) == reference_output(group, index, 64)


def test_a_session_that_ends_for_reasons_of_its_own_makes_no_request_a_suspect() -> None:
    waiting = WaitingQueue()
    group = make_group("a", 6, max_tokens=2)
    waiting.append(group)
    for _ in range(5):
        scheduler = make_scheduler(waiting)
        assert not scheduler.schedule().is_empty
        assert scheduler.release_all(blames=False) == []
    assert not group.is_suspect
    run(scheduler := make_scheduler(waiting), FakeWorker(scheduler.config))
    assert output_of(group) == reference_output(group, 0, 64)


@pytest.mark.parametrize("lost_first", [0, 1])
def test_groups_come_back_in_the_order_of_their_arrival_whichever_of_their_workers_is_lost_first(
    lost_first: int,
) -> None:
    waiting = WaitingQueue()
    groups = [make_group(name, 6) for name in "abcde"]
    for group in groups:
        waiting.append(group)
    schedulers = [make_scheduler(waiting, max_num_seqs=2) for _ in range(2)]
    for scheduler in schedulers:
        scheduler.schedule()
    assert [group.request_id for group in waiting] == ["e"]
    schedulers[lost_first].release_all()
    schedulers[1 - lost_first].release_all()
    assert list(waiting) == groups


def test_a_drained_worker_finishes_what_it_has_and_takes_nothing_more() -> None:
    waiting = WaitingQueue()
    scheduler = make_scheduler(waiting)
    worker = FakeWorker(scheduler.config)
    running, arrival = make_group("running", 6), make_group("arrival", 6)
    waiting.append(running)
    step(scheduler, worker)
    scheduler.set_admission(False)
    waiting.append(arrival)
    run(scheduler, worker)
    assert output_of(running) == reference_output(running, 0, 64)
    assert list(waiting) == [arrival]
    scheduler.set_admission(True)
    run(scheduler, worker)
    assert output_of(arrival) == reference_output(arrival, 0, 64)


def preempted_in_flight(*, cut_short: bool) -> tuple[Scheduler, SequenceGroup]:
    """A worker with a step in flight, and a group of two in it that was preempted since, by a better priority."""
    scheduler = make_scheduler(PriorityQueue(), max_num_seqs=2)
    worker = FakeWorker(scheduler.config)
    group = make_group("group", 4, n=2, max_tokens=9, priority=1)
    scheduler.add_request(group)
    for _ in range(3):
        step(scheduler, worker)
    assert plan(scheduler.schedule()) == {"group": [1, 1]}
    if cut_short:
        scheduler.finish_sequence(group.sequences[1], SequenceStatus.FINISHED_STOPPED)
    scheduler.add_request(make_group("urgent", 4, n=2))
    assert plan(scheduler.schedule()) == {"urgent": [4]}
    return scheduler, group


def test_a_group_that_was_preempted_after_the_step_that_a_worker_is_lost_in_may_be_what_it_was_lost_to() -> None:
    scheduler, group = preempted_in_flight(cut_short=False)
    scheduler.release_all()
    assert group.suspicion is not None
    assert group.suspicion.num_losses == 1


@pytest.mark.parametrize("cut_short", [False, True])
def test_a_group_is_not_blamed_by_a_worker_that_it_has_left_for_another_one(cut_short: bool) -> None:
    """That one could not know, and would count the group's time as others'."""
    scheduler, group = preempted_in_flight(cut_short=cut_short)
    other = make_scheduler(scheduler.waiting, max_num_seqs=2)
    assert "group" in plan(other.schedule())
    scheduler.release_all()
    assert group.suspicion is None
