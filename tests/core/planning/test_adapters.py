"""How many adapters run at a time, and what becomes of requests whose adapter has no slot."""

import pytest
from fake_worker import FakeWorker
from placement_helpers import add, answer, finish_prompts, left, make_fleet, taken, unlike
from scheduler_helpers import make_group, make_scheduler, plan, run, step

from scheduler_service.core import (
    FairQueue,
    PhaseRule,
    PreemptionMode,
    PriorityQueue,
    SequenceStatus,
    WaitingQueue,
)
from scheduler_service.core.placement.balancer import MAX_OVERTAKES
from scheduler_service.core.queues.waiting_queue import MAX_SLOTLESS


def test_no_more_adapters_run_together_than_allowed() -> None:
    scheduler = make_scheduler(PriorityQueue(), max_num_seqs=2, max_loras=1)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("first", 4, priority=1, adapter_id="a", max_tokens=9))
    scheduler.add_request(make_group("second", 4, priority=1, adapter_id="b", max_tokens=9))
    assert list(plan(step(scheduler, worker))) == ["first"]
    scheduler.add_request(make_group("urgent", 4, priority=0, adapter_id="a", max_tokens=2))
    assert set(plan(step(scheduler, worker))) == {"first", "urgent"}
    scheduler.add_request(make_group("base", 4, priority=1, max_tokens=9))
    scheduler.finish_requests(["first", "urgent"], SequenceStatus.FINISHED_ABORTED)
    assert list(plan(step(scheduler, worker))) == ["second", "base"]
    run(scheduler, worker)


@pytest.mark.parametrize("policy", [WaitingQueue, PriorityQueue, FairQueue])
def test_requests_whose_adapter_has_no_slot_do_not_hold_up_others(policy: type[WaitingQueue]) -> None:
    scheduler = make_scheduler(policy(), max_num_seqs=4, max_loras=1)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("runs", 4, adapter_id="a", max_tokens=9))
    step(scheduler, worker)
    for number in range(3):
        scheduler.add_request(make_group(f"slotless {number}", 4, adapter_id="b", max_tokens=9))
    scheduler.add_request(make_group("same", 4, priority=1, adapter_id="a", max_tokens=2))
    scheduler.add_request(make_group("base", 4, priority=1, max_tokens=2))
    assert set(plan(step(scheduler, worker))) == {"runs", "same", "base"}
    assert scheduler.waiting.head.request_id == "slotless 0"
    assert [group.placement.num_overtaken for group in scheduler.waiting] == [2, 2, 2]
    run(scheduler, worker)


def test_a_request_whose_adapter_has_no_slot_is_overtaken_no_more_than_a_bounded_number_of_times() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_loras=1, num_device_blocks=32, max_model_len=100)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("runs", 4, adapter_id="a", max_tokens=60))
    scheduler.add_request(make_group("slotless", 4, adapter_id="b"))
    for number in range(2 * MAX_OVERTAKES):
        scheduler.add_request(make_group(str(number), 4, adapter_id="a" if number % 2 else "", max_tokens=1))
    order: list[str] = []
    while scheduler.has_work:
        order += [name for name in plan(step(scheduler, worker)) if name not in order]
    assert order.index("slotless") == 1 + MAX_OVERTAKES
    assert order[1:17] == [str(number) for number in range(MAX_OVERTAKES)]


def test_a_worker_looks_past_a_bounded_number_of_requests_without_a_slot() -> None:
    scheduler = make_scheduler(max_loras=1)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("runs", 4, adapter_id="a", max_tokens=20))
    for number in range(MAX_SLOTLESS + 1):
        scheduler.add_request(make_group(str(number), 4, adapter_id="b"))
    scheduler.add_request(make_group("base", 4))
    assert list(plan(step(scheduler, worker))) == ["runs"]
    scheduler.finish_requests(["0"], SequenceStatus.FINISHED_ABORTED)
    assert list(plan(step(scheduler, worker))) == ["runs", "base"]
    run(scheduler, worker)


def test_another_worker_takes_a_request_whose_adapter_has_a_slot_there() -> None:
    full, free = fleet = make_fleet(2, max_loras=1)
    free.set_admission(False)
    add(fleet, unlike("runs", adapter_id="a", max_tokens=20))
    finish_prompts(full)
    free.set_admission(True)
    add(fleet, unlike("slotless", adapter_id="b"))
    assert full.room_for(full.waiting.head) is None
    assert taken(full.schedule()) == []
    assert taken(free.schedule()) == ["slotless"]


def test_a_worker_without_a_slot_for_one_request_is_not_passed_by_for_another() -> None:
    """The one that has a slot looks at the adapter's request first, and at the other one as soon as that is taken."""
    busy, lighter = fleet = make_fleet(2, max_loras=1)
    busy.set_admission(False)
    add(fleet, unlike("runs", adapter_id="a", max_tokens=20))
    finish_prompts(lighter)
    lighter.set_admission(False)
    busy.set_admission(True)
    add(fleet, *(unlike(f"base {number}", max_tokens=20) for number in range(3)))
    finish_prompts(busy)
    lighter.set_admission(True)
    add(fleet, unlike("slotless there", adapter_id="b", max_tokens=20))
    output = busy.schedule()
    assert taken(output) == ["slotless there"]
    answer(busy, output, 0.0)
    add(fleet, unlike("other"))
    assert left(busy.schedule()) == {"other": lighter}
    assert taken(lighter.schedule()) == ["other"]


def test_preemption_gives_back_the_victims_adapter_not_the_other_groups() -> None:
    scheduler = make_scheduler(PriorityQueue(), max_loras=1)
    worker = FakeWorker(scheduler.config)
    for name in ("first", "second"):
        scheduler.add_request(make_group(name, 4, priority=2, adapter_id="a", max_tokens=9))
    step(scheduler, worker)
    scheduler.add_request(make_group("urgent", 4, priority=0, adapter_id="b", max_tokens=3))
    assert list(plan(step(scheduler, worker))) == ["urgent"]  # both had to go
    scheduler.add_request(make_group("more", 4, priority=0, adapter_id="b", max_tokens=3))
    assert set(plan(step(scheduler, worker))) == {"urgent", "more"}
    run(scheduler, worker)


@pytest.mark.parametrize("phase_rule", PhaseRule)
def test_a_swapped_group_whose_adapter_has_no_slot_does_not_hold_up_others(phase_rule: PhaseRule) -> None:
    scheduler = make_scheduler(
        PriorityQueue(), max_loras=1, num_host_blocks=16, preemption_mode=PreemptionMode.SWAP, phase_rule=phase_rule
    )
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("slotless", 4, priority=2, adapter_id="a", max_tokens=9))
    step(scheduler, worker)
    scheduler.add_request(make_group("base", 4, priority=2, max_tokens=3))
    step(scheduler, worker)
    step(scheduler, worker)
    scheduler.add_request(make_group("urgent", 4, priority=0, adapter_id="b", max_tokens=20))
    step(scheduler, worker)
    assert [group.request_id for group in scheduler.swapped] == ["slotless", "base"]
    scheduler.add_request(make_group("waits", 4, priority=2, max_tokens=3))
    scheduled = [set(plan(step(scheduler, worker))) for _ in range(6)]
    assert {"base", "waits"} < set.union(*scheduled)
    (passed,) = scheduler.swapped
    assert (passed.request_id, passed.placement.num_overtaken) == ("slotless", 2)
    run(scheduler, worker)


def test_a_swapped_group_whose_adapter_has_no_slot_is_overtaken_no_more_than_a_bounded_number_of_times() -> None:
    scheduler = make_scheduler(
        PriorityQueue(), max_loras=1, num_host_blocks=16, preemption_mode=PreemptionMode.SWAP, max_model_len=100
    )
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("slotless", 4, priority=2, adapter_id="a", max_tokens=9))
    step(scheduler, worker)
    scheduler.add_request(make_group("urgent", 4, priority=0, adapter_id="b", max_tokens=40))
    for number in range(2 * MAX_OVERTAKES):
        scheduler.add_request(make_group(str(number), 4, priority=2, max_tokens=1))
    step(scheduler, worker)
    (slotless,) = scheduler.swapped
    overtook: set[str] = set()
    while "slotless" not in (planned := plan(step(scheduler, worker))):
        overtook |= planned.keys() - {"urgent"}
    assert len(overtook) == slotless.placement.num_overtaken == MAX_OVERTAKES
    run(scheduler, worker)
