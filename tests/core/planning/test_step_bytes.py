"""What a step tells the worker of sequences is counted in bytes, as what it computes is counted in tokens."""

from fake_worker import FakeWorker
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run, step

from scheduler_service.core import PreemptionMode
from scheduler_service.core.planning.step import bytes_to_tell

BYTES_OF_ONE = bytes_to_tell(make_group("g", 8).sequences[0], 2)  # with two blocks of four tokens


def test_a_request_that_the_steps_bytes_have_no_room_for_is_admitted_by_the_next_step() -> None:
    scheduler = make_scheduler(max_step_bytes=2 * BYTES_OF_ONE, prefix_caching=False)
    worker = FakeWorker(scheduler.config)
    for name in "abc":
        scheduler.add_request(make_group(name, 8))
    assert plan(step(scheduler, worker)) == {"a": [8], "b": [8]}
    assert plan(step(scheduler, worker)) == {"a": [1], "b": [1], "c": [8]}


def test_a_request_that_is_larger_than_the_steps_bytes_is_told_alone() -> None:
    scheduler = make_scheduler(max_step_bytes=1)
    worker = FakeWorker(scheduler.config)
    for name in "abc":
        scheduler.add_request(make_group(name, 8))
    assert [len(step(scheduler, worker).new_sequences) for _ in range(4)] == [1, 1, 1, 0]


def test_followers_that_the_steps_bytes_have_no_room_for_fork_in_later_steps() -> None:
    scheduler = make_scheduler(max_step_bytes=1)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(group := make_group("g", 8, n=4))
    assert [len(step(scheduler, worker).forks) for _ in range(4)] == [0, 1, 1, 1]
    run(scheduler, worker)
    assert [len(output_of(group, index)) for index in range(4)] == [4] * 4


def test_tables_of_swapped_sequences_are_told_again_within_the_steps_bytes() -> None:
    scheduler = make_scheduler(
        max_step_bytes=1, num_host_blocks=16, preemption_mode=PreemptionMode.SWAP, num_device_blocks=10
    )
    worker = FakeWorker(scheduler.config)
    groups = [make_group(name, 8, n=2, max_tokens=12, root=name.encode()) for name in "ab"]
    for group in groups:
        scheduler.add_request(group)
    most_told = 0
    while scheduler.has_work:
        output = step(scheduler, worker)
        most_told = max(most_told, sum(not update.start for update in output.block_table_updates))
    assert scheduler.num_preemptions[PreemptionMode.SWAP]
    assert most_told == 1
    assert [len(output_of(group, index)) for group in groups for index in range(2)] == [12] * 4
