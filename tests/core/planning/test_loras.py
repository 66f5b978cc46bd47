"""Which adapters a worker is brought, which give way, and what becomes of requests that wait for theirs."""

import pytest
from fake_worker import FakeWorker
from placement_helpers import add, answer, finish, left, make_fleet, taken, unlike
from scheduler_helpers import make_group, make_scheduler, plan, run, step, suspect

from scheduler_service.core import FairQueue, PreemptionMode, PriorityQueue, Scheduler, SequenceStatus, WaitingQueue
from scheduler_service.core.placement.balancer import MAX_OVERTAKES
from scheduler_service.core.queues.waiting_queue import MAX_AWAITING, MAX_SLOTLESS


def bring(scheduler: Scheduler, *wanted: str) -> str:
    """Bring one that is wanted; returns which gave way to it."""
    fetch = scheduler.begin_fetch(wanted)
    assert fetch is not None
    scheduler.end_fetch(0.1)
    return fetch.dropped


@pytest.mark.parametrize("policy", [WaitingQueue, PriorityQueue, FairQueue])
def test_a_request_waits_until_its_adapter_has_come_and_others_do_not(policy: type[WaitingQueue]) -> None:
    scheduler = make_scheduler(policy(), max_held_loras=2)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("waits", 4, adapter_id="a"))
    scheduler.add_request(make_group("base", 4))
    output = step(scheduler, worker)
    assert (list(plan(output)), output.lacking_adapters) == (["base"], ["a"])
    fetch = scheduler.begin_fetch(output.lacking_adapters)
    assert (fetch, scheduler.begin_fetch(["b"])) == (("a", ""), None)
    assert list(plan(step(scheduler, worker))) == ["base"]
    scheduler.end_fetch(0.5)
    output = step(scheduler, worker)
    assert (set(plan(output)), output.lacking_adapters) == ({"base", "waits"}, [])
    run(scheduler, worker)


def test_any_number_of_requests_may_go_ahead_of_one_whose_adapter_is_on_its_way() -> None:
    """It comes no later for them."""
    scheduler = make_scheduler(max_held_loras=1)
    worker = FakeWorker(scheduler.config)
    waits = make_group("waits", 4, adapter_id="a")
    scheduler.add_request(waits)
    scheduler.begin_fetch(["a"])
    for number in range(2 * MAX_OVERTAKES):
        scheduler.add_request(make_group(str(number), 4, max_tokens=1))
        assert list(plan(step(scheduler, worker))) == [str(number)]
    assert waits.placement.num_overtaken == 0
    scheduler.end_fetch(0.1)
    assert list(plan(step(scheduler, worker))) == ["waits"]
    run(scheduler, worker)


def test_few_go_ahead_of_one_whose_adapter_has_no_place() -> None:
    """And when those are done that need the others, one of these gives way."""
    scheduler = make_scheduler(max_held_loras=1, max_loras=2, max_model_len=100, num_device_blocks=32)
    worker = FakeWorker(scheduler.config)
    bring(scheduler, "a")
    scheduler.add_request(make_group("runs", 4, adapter_id="a", max_tokens=60))
    step(scheduler, worker)
    waits = make_group("waits", 4, adapter_id="b")
    scheduler.add_request(waits)
    started: set[str] = set()
    for number in range(2 * MAX_OVERTAKES):
        scheduler.add_request(make_group(str(number), 4, adapter_id="a" if number % 2 else "", max_tokens=1))
        output = step(scheduler, worker)
        started |= plan(output).keys()
        assert output.lacking_adapters == ["b"]
        assert scheduler.begin_fetch(output.lacking_adapters) is None
    assert len(started) == 1 + MAX_OVERTAKES
    scheduler.finish_requests(["runs"], SequenceStatus.FINISHED_ABORTED)
    assert bring(scheduler, "b") == "a"
    assert "waits" in plan(step(scheduler, worker))
    scheduler.finish_requests([str(number) for number in range(2 * MAX_OVERTAKES)], SequenceStatus.FINISHED_ABORTED)
    run(scheduler, worker)


def test_the_least_recently_used_gives_way_and_none_that_a_request_here_needs() -> None:
    scheduler = make_scheduler(
        PriorityQueue(), max_held_loras=3, max_loras=3, num_host_blocks=16, preemption_mode=PreemptionMode.SWAP
    )
    worker = FakeWorker(scheduler.config)
    for name in ("a", "b", "c"):
        bring(scheduler, name)
    for name in ("b", "a", "c"):
        scheduler.add_request(make_group(name, 4, priority=2, adapter_id=name, max_tokens=2 if name != "c" else 20))
        step(scheduler, worker)
        step(scheduler, worker)
    scheduler.add_request(make_group("urgent", 60, priority=0, max_tokens=4))
    step(scheduler, worker)
    assert [group.request_id for group in scheduler.swapped] == ["c"]
    assert [bring(scheduler, "d"), bring(scheduler, "e")] == ["b", "a"]
    assert scheduler.adapters.held == {"c", "d", "e"}
    with pytest.raises(ValueError, match="groups of the worker need"):
        scheduler.drop_adapter("c")
    run(scheduler, worker)


def test_one_that_came_for_a_waiting_request_stays_until_it_was_used() -> None:
    """As long as that request lives: else two of them could take each other's adapter away."""
    scheduler = make_scheduler(max_held_loras=2, max_loras=1)
    worker = FakeWorker(scheduler.config)
    bring(scheduler, "a")
    scheduler.add_request(make_group("runs", 4, adapter_id="a", max_tokens=30))
    scheduler.add_request(make_group("next", 4, adapter_id="b"))
    scheduler.add_request(make_group("after it", 4, adapter_id="c"))
    step(scheduler, worker)
    bring(scheduler, "b")
    assert step(scheduler, worker).lacking_adapters == ["c"]
    assert scheduler.begin_fetch(["c"]) is None
    scheduler.finish_requests(["next"], SequenceStatus.FINISHED_ABORTED)
    assert bring(scheduler, "c") == "b"
    run(scheduler, worker)


def test_others_come_only_where_there_is_room_and_go_first() -> None:
    scheduler = make_scheduler(max_held_loras=2)
    assert scheduler.begin_fetch([], ["a", "b", "c"]) == ("a", "")
    scheduler.end_fetch(0.1)
    assert scheduler.begin_fetch(["x"], ["b"]) == ("x", "")
    scheduler.end_fetch(None)  # it did not come
    assert scheduler.begin_fetch([], ["a", "b"]) == ("b", "")
    scheduler.end_fetch(0.1)
    assert scheduler.begin_fetch([], ["c"]) is None
    assert bring(scheduler, "x") == "b"
    with pytest.raises(ValueError, match="no adapter is being fetched"):
        scheduler.end_fetch(0.1)


def test_what_came_for_requests_that_are_gone_gives_way_before_what_is_used() -> None:
    scheduler = make_scheduler(max_held_loras=8, max_loras=8)
    worker = FakeWorker(scheduler.config)
    for number in range(7):
        bring(scheduler, f"for one that is gone {number}")
    num_fetches = 0
    for number in range(40):
        name = "pqrs"[number % 4]
        if not scheduler.adapters.holds(name):
            bring(scheduler, name)
            num_fetches += 1
        scheduler.add_request(make_group(str(number), 4, adapter_id=name, max_tokens=2))
        run(scheduler, worker)
    assert num_fetches == 4


@pytest.mark.parametrize("num_waiting", [1, MAX_SLOTLESS, MAX_SLOTLESS + 1])
def test_a_swapped_request_goes_before_those_that_wait_for_the_place_of_its_adapter(num_waiting: int) -> None:
    """Also before those that outrank it: there is no place before it has ended."""
    scheduler = make_scheduler(
        PriorityQueue(),
        max_held_loras=1,
        num_host_blocks=16,
        num_device_blocks=8,
        preemption_mode=PreemptionMode.SWAP,
        max_model_len=32,
    )
    worker = FakeWorker(scheduler.config)
    bring(scheduler, "x")
    scheduler.add_request(make_group("low", 12, priority=2, adapter_id="x", max_tokens=8))
    step(scheduler, worker)
    scheduler.add_request(make_group("urgent", 24, priority=0, max_tokens=3))
    step(scheduler, worker)
    assert [group.request_id for group in scheduler.swapped] == ["low"]
    groups = [make_group(str(number), 4, priority=1, adapter_id="y") for number in range(num_waiting)]
    for group in groups:
        scheduler.add_request(group)
    for _ in range(100):
        if lacking := step(scheduler, worker).lacking_adapters:
            fetch = scheduler.begin_fetch(lacking)
            if fetch is not None:
                scheduler.end_fetch(0.1)
    assert all(group.is_finished for group in groups)
    assert not scheduler.has_work


def test_nothing_is_preempted_for_a_request_whose_adapter_is_not_there() -> None:
    scheduler = make_scheduler(PriorityQueue(), max_held_loras=1, max_num_seqs=1)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("runs", 4, priority=2, max_tokens=9))
    step(scheduler, worker)
    scheduler.add_request(make_group("urgent", 4, priority=0, adapter_id="a"))
    assert list(plan(step(scheduler, worker))) == ["runs"]
    bring(scheduler, "a")
    assert list(plan(step(scheduler, worker))) == ["urgent"]
    run(scheduler, worker)


def test_a_suspect_waits_for_its_adapter_and_holds_up_nothing() -> None:
    scheduler = make_scheduler(max_held_loras=1)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(suspect(make_group("suspect", 4, adapter_id="a")))
    scheduler.add_request(make_group("base", 4))
    output = step(scheduler, worker)
    assert (list(plan(output)), output.lacking_adapters) == (["base"], ["a"])
    bring(scheduler, "a")
    assert list(plan(step(scheduler, worker))) == ["suspect"]
    run(scheduler, worker)


def test_a_bounded_number_of_requests_is_looked_past() -> None:
    scheduler = make_scheduler(max_held_loras=1)
    for number in range(MAX_AWAITING + MAX_SLOTLESS):
        scheduler.add_request(make_group(str(number), 4, adapter_id=f"lora {number}"))
    scheduler.add_request(make_group("base", 4, max_tokens=9))
    assert list(plan(step(scheduler, FakeWorker(scheduler.config)))) == ["base"]
    for number in range(3):
        scheduler.add_request(make_group(f"one more {number}", 4, adapter_id="another"))
    scheduler.add_request(make_group("held up", 4))
    output = scheduler.schedule()
    assert list(plan(output)) == ["base"]
    assert len(output.lacking_adapters) == MAX_AWAITING + MAX_SLOTLESS + 1


def test_an_adapter_is_brought_to_a_second_worker_only_if_the_first_has_too_much_to_do() -> None:
    holder, other = fleet = make_fleet(2, max_held_loras=2, prefill_tokens_per_second=1000)
    bring(holder, "a")
    add(fleet, unlike("first", 100, adapter_id="a"))
    assert other.schedule().lacking_adapters == []
    assert taken(holder.schedule()) == ["first"]
    add(fleet, *(unlike(str(number), 900, adapter_id="a", max_tokens=100) for number in range(4)))
    holder.schedule()
    add(fleet, unlike("next", 10, adapter_id="a"))
    assert other.schedule().lacking_adapters == ["a"]


def test_a_request_that_was_left_to_the_holder_is_looked_at_again_when_that_has_become_full() -> None:
    holder, other = fleet = make_fleet(2, max_held_loras=2, max_num_seqs=1, prefill_tokens_per_second=1000)
    bring(holder, "a")
    add(fleet, unlike("first", 10, adapter_id="a", max_tokens=500), unlike("second", 10, adapter_id="a"))
    output = other.schedule()
    assert left(output) == {"first": holder, "second": holder}
    assert output.ask_again_at is not None
    assert taken(holder.schedule()) == ["first"]
    assert other.schedule(output.ask_again_at).lacking_adapters == ["a"]


def test_a_suspect_is_brought_its_adapter_where_it_says_more() -> None:
    """That it would be done sooner at the holder, which it was lost with, does not count."""
    waiting = WaitingQueue()
    sizes = {"max_held_loras": 2, "prefill_tokens_per_second": 1000}
    holder, other = (make_scheduler(waiting, name, **sizes) for name in ("holder", "other"))
    bring(holder, "a")
    holder.add_request(suspect(make_group("suspect", 4, adapter_id="a"), 2, "holder"))
    assert left(holder.schedule()) == {"suspect": other}
    assert other.schedule().lacking_adapters == ["a"]
    bring(other, "a")
    assert taken(other.schedule()) == ["suspect"]


def test_what_a_lost_worker_held_is_not_looked_for_there() -> None:
    holder, other = fleet = make_fleet(2, max_held_loras=2)
    bring(holder, "a")
    holder.release_all()
    add(fleet[1:], unlike("first", adapter_id="a"))
    assert other.schedule().lacking_adapters == ["a"]
    assert len(other.balancer.adapter_directory) == 0


def test_a_request_goes_where_its_adapter_is_on_the_device() -> None:
    """The copy counts in seconds, as cached tokens do."""
    fleet = make_fleet(2, max_held_loras=2, max_loras=1, lora_copy_seconds=0.5, prefill_tokens_per_second=10_000)
    for scheduler in fleet:
        bring(scheduler, "a")
        bring(scheduler, "b")
    for scheduler, name in zip(fleet, ("a", "b"), strict=True):
        scheduler.add_request(unlike(f"used {name}", adapter_id=name))
        output = scheduler.schedule()
        assert taken(output) == [f"used {name}"]
        answer(scheduler, output, 0.0)
        finish(scheduler)
    for (here, there), name in zip((fleet, fleet[::-1]), ("a", "b"), strict=True):
        there.add_request(unlike(f"next {name}", 10, adapter_id=name))
        assert taken(there.schedule()) == []
        assert taken(here.schedule()) == [f"next {name}"]
