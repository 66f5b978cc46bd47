"""How many adapters run at a time."""

from fake_worker import FakeWorker
from scheduler_helpers import make_group, make_scheduler, plan, run, step

from scheduler_service.core import (
    PriorityQueue,
    SequenceStatus,
)


def test_no_more_adapters_run_together_than_allowed() -> None:
    scheduler = make_scheduler(PriorityQueue(), max_num_seqs=2, max_loras=1)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("first", 4, priority=1, lora_name="a", max_tokens=9))
    scheduler.add_request(make_group("second", 4, priority=1, lora_name="b", max_tokens=9))
    scheduler.add_request(make_group("base", 4, priority=1, max_tokens=9))
    assert list(plan(step(scheduler, worker))) == ["first"]  # and nobody overtakes the second, who waits for a slot
    scheduler.add_request(make_group("urgent", 4, priority=0, lora_name="a", max_tokens=2))
    assert set(plan(step(scheduler, worker))) == {"first", "urgent"}
    scheduler.finish_requests(["first", "urgent"], SequenceStatus.FINISHED_ABORTED)
    assert list(plan(step(scheduler, worker))) == ["second", "base"]
    run(scheduler, worker)


def test_preemption_gives_back_the_victims_adapter_not_the_other_groups() -> None:
    scheduler = make_scheduler(PriorityQueue(), max_loras=1)
    worker = FakeWorker(scheduler.config)
    for name in ("first", "second"):
        scheduler.add_request(make_group(name, 4, priority=2, lora_name="a", max_tokens=9))
    step(scheduler, worker)
    scheduler.add_request(make_group("urgent", 4, priority=0, lora_name="b", max_tokens=3))
    assert list(plan(step(scheduler, worker))) == ["urgent"]  # both had to go
    scheduler.add_request(make_group("more", 4, priority=0, lora_name="b", max_tokens=3))
    assert set(plan(step(scheduler, worker))) == {"urgent", "more"}
    run(scheduler, worker)
