"""What has ended is not kept: neither requests that were cancelled nor sessions that are over."""

import gc
import tracemalloc
from array import array

import pytest
from fake_worker import FakeWorker
from scheduler_helpers import make_group, make_scheduler, run, step, suspect

from scheduler_service.core import FairQueue, PriorityQueue, Scheduler, SequenceGroup, SequenceStatus, WaitingQueue


def num_alive(kind: type) -> int:
    gc.collect()
    return sum(type(item) is kind for item in gc.get_objects())


@pytest.mark.parametrize("policy", [WaitingQueue, PriorityQueue, FairQueue])
def test_no_queue_keeps_a_cancelled_request(policy: type[WaitingQueue]) -> None:
    """One of the worst priority, of a tenant that is never served, is behind the others and stays."""
    num_before = num_alive(SequenceGroup)
    scheduler = make_scheduler(policy())
    scheduler.add_request(make_group("first", 1, priority=-1, tenant="first"))
    for number in range(1000):
        scheduler.add_request(make_group(str(number), 1, priority=number % 5, tenant=str(number)))
    assert num_alive(SequenceGroup) == num_before + 1001
    for number in range(1000):
        scheduler.finish_requests([str(number)], SequenceStatus.FINISHED_ABORTED)
    assert num_alive(SequenceGroup) == num_before + 1


def test_a_suspect_that_has_ended_is_not_kept() -> None:
    num_before = num_alive(SequenceGroup)
    scheduler = make_scheduler()
    scheduler.add_request(suspect(make_group("suspect", 6)))
    run(scheduler, FakeWorker(scheduler.config))
    assert num_alive(SequenceGroup) == num_before


def test_made_up_tenants_that_cancel_do_not_fill_the_memory() -> None:
    queue = FairQueue()
    queue.append(make_group("first", 1, tenant=""))  # of equal tenants it stays the first
    for number in range(1000):
        queue.append(make_group(str(number), 1, tenant=str(number)))
        queue.end(str(number))
    assert len(queue._heap) < 100
    assert len(queue._in_heap) < 100


def test_a_session_that_is_over_goes_at_once_with_its_blocks() -> None:
    """It does not wait for the collector, nor until the balancer comes across it."""
    queue = WaitingQueue()
    stays = make_scheduler(queue)
    num_before = num_alive(Scheduler)
    gc.disable()
    try:
        for _ in range(20):
            scheduler = make_scheduler(queue)
            scheduler.add_request(make_group("g", 8))
            scheduler.schedule()
            scheduler.release_all()
            queue.end("g")
            del scheduler
        assert sum(type(item) is Scheduler for item in gc.get_objects()) == num_before
    finally:
        gc.enable()
    assert stays.balancer is queue.balancer


def test_a_waiting_request_takes_four_bytes_a_token_however_many_outputs_it_has() -> None:
    prompt = array("I", range(100_000))
    tracemalloc.start()
    try:
        group = make_group("g", 0, n=128)
        before, _ = tracemalloc.get_traced_memory()
        groups = [SequenceGroup(str(number), prompt, group.sampling) for number in range(2)]
        shared, _ = tracemalloc.get_traced_memory()
        own = SequenceGroup("own", list(prompt), group.sampling)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(other.prompt_token_ids is prompt for other in groups)
    assert shared - before < 400_000
    assert after - shared < 600_000
    assert all(sequence.prompt_token_ids is own.prompt_token_ids for sequence in own.sequences)


def test_outputs_share_their_prompt_and_its_keys_while_they_run() -> None:
    scheduler = make_scheduler(num_device_blocks=64, max_model_len=200)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(group := make_group("g", 101, n=4))
    run_until = [step(scheduler, worker) for _ in range(4)]
    assert run_until[-1].num_samples == 4
    leader, *followers = group.sequences
    for follower in followers:
        assert follower.prompt_token_ids is leader.prompt_token_ids
        assert all(key is leaders for key, leaders in zip(follower.block_keys[:25], leader.block_keys, strict=False))
        assert len(follower.block_keys) >= 25
