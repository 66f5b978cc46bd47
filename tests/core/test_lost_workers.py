"""What becomes of groups whose worker is lost, and of those it is lost to."""

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
