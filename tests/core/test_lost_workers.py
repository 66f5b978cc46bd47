"""What becomes of groups whose worker is lost or drained, and of those it is lost to."""

import pytest
from fake_worker import FakeWorker, reference_output
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run, step

from scheduler_service.core import (
    SequenceStatus,
    WaitingQueue,
)


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


def test_a_request_that_brings_workers_down_ends_alone_and_the_others_finish() -> None:
    """Five requests are in the step that a worker is lost in, again and again; only one of them is the reason."""
    waiting = WaitingQueue()
    groups = [make_group(name, 6, n=n, max_tokens=5) for name, n in (("a", 1), ("b", 2), ("poison", 1), ("c", 3))]
    poison = groups[2]
    scheduler = make_scheduler(waiting)
    for group in groups:
        scheduler.add_request(group)
    worker = FakeWorker(scheduler.config)
    num_losses = 0
    while scheduler.has_work:
        output = scheduler.schedule()
        scheduler.blocks.check()
        if poison.request_id in plan(output) and poison.sequences[0].num_output_tokens == 2:
            num_losses += 1
            ended = scheduler.release_all()
            assert ended == ([poison] if num_losses == 3 else [])
            scheduler = make_scheduler(waiting)
            worker = FakeWorker(scheduler.config)
        elif not output.is_empty:
            scheduler.update_from_output(output, worker.execute(output))
    assert num_losses == 3
    assert poison.error == "3 workers failed in a row while computing this request"
    assert poison.sequences[0].status is SequenceStatus.FINISHED_ABORTED
    for group in (groups[0], groups[1], groups[3]):
        for index in range(group.sampling.n):
            assert output_of(group, index) == reference_output(group, index, 64)


def test_a_worker_that_is_lost_again_and_again_ends_nobody_who_gains_tokens() -> None:
    waiting = WaitingQueue()
    group = make_group("a", 6, max_tokens=8)
    waiting.append(group)
    for _ in range(8):
        scheduler = make_scheduler(waiting)
        step(scheduler, FakeWorker(scheduler.config))
        if scheduler.has_work:
            scheduler.schedule()
            assert scheduler.release_all() == []
    assert output_of(group) == reference_output(group, 0, 64)


def test_a_poison_that_joins_while_an_answer_is_on_its_way_is_found_too() -> None:
    """The worker dies in the second step in flight, before its answer to the first has left it."""
    waiting = WaitingQueue()
    innocent, poison = make_group("innocent", 6, max_tokens=5), make_group("poison", 6, max_tokens=5)
    waiting.append(innocent)
    scheduler = make_scheduler(waiting)
    scheduler.schedule()
    waiting.append(poison)
    assert plan(scheduler.schedule()) == {"innocent": [1], "poison": [6]}
    scheduler.release_all()
    assert poison.num_lost_steps == innocent.num_lost_steps == 1


def test_a_session_that_ends_for_reasons_of_its_own_makes_nobody_a_suspect() -> None:
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


def test_a_suspect_that_waits_does_not_hold_up_a_drained_worker() -> None:
    waiting = WaitingQueue()
    scheduler = make_scheduler(waiting)
    worker = FakeWorker(scheduler.config)
    running, suspect = make_group("running", 6), make_group("suspect", 6)
    waiting.append(running)
    step(scheduler, worker)
    scheduler.set_admission(False)
    suspect.num_lost_steps = 2
    waiting.append(suspect)
    run(scheduler, worker)
    assert output_of(running) == reference_output(running, 0, 64)
    assert suspect.request_id in waiting
