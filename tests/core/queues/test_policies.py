from collections import Counter

import pytest
from fake_worker import FakeWorker, reference_output
from hypothesis import given
from hypothesis import strategies as st
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run, run_ahead, step

from scheduler_service.core import FairQueue, PreemptionMode, PriorityQueue, SequenceGroup, WaitingQueue


def take(queue: WaitingQueue) -> SequenceGroup:
    head = queue.head
    queue.remove(head.request_id)
    return head


@pytest.mark.parametrize("policy", [WaitingQueue, PriorityQueue, FairQueue])
@given(operations=st.lists(st.tuples(st.sampled_from(["append", "pop", "put back", "remove"]), st.integers(0, 9))))
def test_a_queue_gives_every_group_exactly_once_and_knows_which_came_first(
    policy: type[WaitingQueue], operations: list[tuple[str, int]]
) -> None:
    queue, waiting, popped, count = policy(), {}, [], 0
    for operation, number in operations:
        if operation == "append":
            group = make_group(str(count), 1, priority=number % 3, tenant=str(number % 2))
            group.arrived_at = number
            queue.append(group)
            waiting[group.request_id] = group
            count += 1
        elif operation == "pop" and waiting:
            head = queue.head
            assert take(queue) is head
            assert waiting.pop(head.request_id) is head
            popped.append(head)
        elif operation == "put back" and popped:
            group = popped.pop()
            queue.put_back([group])
            waiting[group.request_id] = group
        elif operation == "remove" and waiting:
            request_id = sorted(waiting)[number % len(waiting)]
            queue.remove(request_id)
            del waiting[request_id]
            queue.remove(request_id)  # nothing happens
        assert len(queue) == len(waiting)
        assert set(queue) == set(waiting.values())
        if waiting:
            assert queue.earliest_arrival == min(group.arrived_at for group in waiting.values())
        assert all(queue.get(request_id) is group for request_id, group in waiting.items())


def test_lower_numbers_go_first_and_equal_ones_in_the_order_of_arrival() -> None:
    queue = PriorityQueue()
    for name, priority in (("c", 1), ("a", -1), ("d", 1), ("b", 0)):
        queue.append(make_group(name, 1, priority=priority))
    assert [take(queue).request_id for _ in range(4)] == ["a", "b", "c", "d"]


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=200), st.integers(1, 8))
def test_no_group_is_overtaken_more_often_than_ageing_allows(arrivals: list[tuple[int, bool]], overtakes: int) -> None:
    """At most `overtakes` later arrivals for each level of priority between the two."""
    queue = PriorityQueue(overtakes)
    number_of: dict[SequenceGroup, int] = {}
    overtaken: Counter[tuple[SequenceGroup, int]] = Counter()
    for number, (priority, pops) in enumerate(arrivals):
        group = make_group(str(number), 1, priority=priority)
        number_of[group] = number
        queue.append(group)
        if pops:
            first = take(queue)
            for other in queue:
                if number_of[other] < number_of[first]:
                    overtaken[other, other.priority - first.priority] += 1
    for (_, levels), count in overtaken.items():
        assert levels > 0
        assert count <= levels * overtakes


def test_a_better_priority_takes_the_place_of_the_worst_and_that_one_still_finishes() -> None:
    queue = PriorityQueue()
    scheduler = make_scheduler(queue, num_device_blocks=8, max_num_seqs=2)
    worker = FakeWorker(scheduler.config)
    low, middle = make_group("low", 6, priority=5, max_tokens=8), make_group("middle", 6, priority=3, max_tokens=8)
    for group in (low, middle):
        scheduler.add_request(group)
    step(scheduler, worker)
    step(scheduler, worker)
    urgent = make_group("urgent", 6, priority=0, max_tokens=8)
    scheduler.add_request(urgent)
    low_id = low.sequences[0].id
    output = step(scheduler, worker)
    assert set(plan(output)) == {"middle", "urgent"}
    assert output.preempted == [low_id]
    equal = make_group("equal", 6, priority=0)
    scheduler.add_request(equal)
    assert set(plan(step(scheduler, worker))) == {"equal", "urgent"}  # middle's turn to make room
    another = make_group("another", 6, priority=0)
    scheduler.add_request(another)
    assert "another" not in plan(step(scheduler, worker))  # equals do not preempt each other
    run(scheduler, worker)
    assert all(len(output_of(group)) == 8 for group in (low, middle, urgent))


def test_a_group_that_outranks_a_running_one_takes_its_place_also_when_it_is_not_the_head() -> None:
    """The head came before the running one, which is no worse, but not before it was given to the worker."""
    queue = PriorityQueue(overtakes=1)
    scheduler = make_scheduler(queue, max_num_seqs=2)
    worker = FakeWorker(scheduler.config)
    head = make_group("head", 4, priority=9)
    queue.append(head)
    queue.remove("head")
    scheduler.add_request(make_group("running", 4, priority=9, root=b"r", max_tokens=20))
    step(scheduler, worker)
    step(scheduler, worker)
    queue.put_back([head])
    scheduler.add_request(make_group("urgent", 4, priority=7, root=b"u"))
    output = step(scheduler, worker)
    assert plan(output) == {"head": [4], "urgent": [4]}
    assert len(output.preempted) == 1
    run(scheduler, worker)


def test_a_better_priority_does_not_wait_for_tokens_that_worse_ones_take_of_every_step() -> None:
    """As many may run as a step has tokens: so nothing is left of any step while they decode."""
    scheduler = make_scheduler(PriorityQueue(), max_num_batched_tokens=4, max_num_seqs=4, num_device_blocks=64)
    worker = FakeWorker(scheduler.config)
    low = [make_group(str(i), 4, priority=5, max_tokens=30) for i in range(4)]
    for group in low:
        scheduler.add_request(group)
    while sum(map(len, plan(step(scheduler, worker)).values())) < 4:
        pass
    scheduler.add_request(make_group("urgent", 4, max_tokens=3, root=b"u"))
    assert plan(step(scheduler, worker)) == {"0": [1], "1": [1], "2": [1], "urgent": [1]}
    scheduler.add_request(make_group("equal", 4, priority=5, root=b"e"))
    assert "equal" not in plan(step(scheduler, worker))
    run(scheduler, worker)
    assert [output_of(group) for group in low] == [reference_output(group, 0, 64) for group in low]


def test_groups_of_equal_rank_do_not_preempt_each_other_for_ever() -> None:
    """The second comes one level better and as much later as evens it out; steps are planned ahead of the answers."""
    scheduler = make_scheduler(PriorityQueue(overtakes=1), num_device_blocks=8, block_size=2)
    worker = FakeWorker(scheduler.config)
    for name, priority in (("older", 1), ("younger", 0)):
        scheduler.add_request(make_group(name, 2, priority=priority, root=name.encode(), max_tokens=12))
    run_ahead(scheduler, worker, 3, most_steps=100)
    assert sum(scheduler.num_preemptions.values()) <= 3


def test_a_victim_of_priority_keeps_its_blocks_in_host_memory_and_waits_among_the_swapped() -> None:
    scheduler = make_scheduler(PriorityQueue(), num_host_blocks=16, max_num_seqs=1, preemption_mode=PreemptionMode.SWAP)
    worker = FakeWorker(scheduler.config)
    low = make_group("low", 6, priority=5, max_tokens=8)
    scheduler.add_request(low)
    step(scheduler, worker)
    scheduler.add_request(make_group("urgent", 6, root=b"urgent", max_tokens=8))
    output = step(scheduler, worker)
    assert set(plan(output)) == {"urgent"}
    assert len(output.blocks_to_swap_out) == 2
    assert not output.preempted
    assert list(scheduler.swapped) == [low]
    assert low.request_id not in scheduler.waiting
    run(scheduler, worker)
    assert output_of(low) == reference_output(low, 0, 64)


def test_no_group_is_preempted_when_that_would_not_make_enough_room() -> None:
    queue = PriorityQueue()
    scheduler = make_scheduler(queue, num_device_blocks=8)
    worker = FakeWorker(scheduler.config)
    for name, priority in (("better", -2), ("worse", 2)):
        scheduler.add_request(make_group(name, 14, priority=priority, max_tokens=2, root=name.encode()))
    step(scheduler, worker)
    scheduler.add_request(make_group("large", 25, priority=0, max_tokens=2, root=b"large"))
    assert set(plan(step(scheduler, worker))) == {"better", "worse"}


def test_making_room_counts_blocks_that_victims_share_and_those_that_others_hold_already() -> None:
    scheduler = make_scheduler(PriorityQueue(), num_device_blocks=8)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("better", 16, priority=0, max_tokens=9))
    step(scheduler, worker)
    scheduler.add_request(make_group("worse", 10, priority=2, root=b"own", max_tokens=2))
    step(scheduler, worker)
    assert scheduler.blocks.device.num_free == 0
    urgent = make_group("urgent", 23, priority=1, max_tokens=1)  # of its 6 blocks the better one holds 4
    scheduler.add_request(urgent)
    assert plan(step(scheduler, worker)) == {"better": [1], "urgent": [7]}
    run(scheduler, worker)


def test_victims_that_share_a_prompt_make_room_together() -> None:
    scheduler = make_scheduler(PriorityQueue(), num_device_blocks=10)
    worker = FakeWorker(scheduler.config)
    for name, num_tokens, priority in (("better", 4, 0), ("one", 18, 2), ("other", 18, 2)):
        scheduler.add_request(make_group(name, num_tokens, priority=priority, root=bytes(num_tokens), max_tokens=9))
        step(scheduler, worker)
    assert scheduler.blocks.device.num_free == 2
    scheduler.add_request(make_group("urgent", 28, priority=1, root=b"urgent", max_tokens=1))
    assert plan(step(scheduler, worker)) == {"better": [1], "urgent": [28]}
    run(scheduler, worker)


def serve(queue: FairQueue, num_steps: int, load: dict[str, int]) -> Counter[str]:
    """Output tokens that each tenant gets of a worker that runs two sequences, when all have requests without end."""
    scheduler = make_scheduler(queue, max_num_seqs=2, num_device_blocks=64)
    worker = FakeWorker(scheduler.config)
    served: Counter[str] = Counter()
    number = 0
    for _ in range(num_steps):
        for tenant, backlog in load.items():
            for _ in range(backlog - sum(group.tenant == tenant for group in queue)):
                scheduler.add_request(make_group(f"{tenant}{number}", 6, tenant=tenant, max_tokens=8))
                number += 1
        output = scheduler.schedule()
        for gained in scheduler.update_from_output(output, worker.execute(output)):
            served[gained.sequence.group.tenant] += gained.token_id is not None
    return served


def test_a_tenant_that_floods_the_queue_gets_no_more_than_one_that_does_not() -> None:
    served = serve(FairQueue(), 400, {"flood": 50, "modest": 1})
    assert abs(served["flood"] - served["modest"]) <= 4 * 8  # a few requests' worth


def test_service_follows_the_weights() -> None:
    served = serve(FairQueue({"gold": 3.0}), 800, {"gold": 5, "plain": 5})
    assert served["gold"] / served["plain"] == pytest.approx(3, rel=0.1)


def test_made_up_tenants_do_not_fill_the_memory() -> None:
    queue = FairQueue()
    for number in range(20_000):
        queue.append(make_group(str(number), 1, tenant=str(number)))
        queue.charge(take(queue), 1, 1)
        queue.end(str(number))
    assert len(queue.counters) <= 4096 + 1
    queue.append(make_group("stays", 1, tenant="lowest"))
    for number in range(1000):
        queue.append(make_group(str(number), 1, tenant="comes and goes"))
        queue.end(str(number))
    assert len(queue._heap) < 10


@pytest.mark.parametrize("policy", [WaitingQueue, PriorityQueue, FairQueue])
def test_arrivals_that_have_left_do_not_fill_the_memory(policy: type[WaitingQueue]) -> None:
    queue = policy()
    for number in range(10_000):  # the first one stays, and is never asked for
        queue.append(make_group(str(number), 1, priority=-number))
        if number:
            queue.put_back([take(queue)])
            queue.end(str(number))
    assert len(queue) == len(queue.live) == 1
    assert len(queue._arrivals) < 100


def test_no_tenant_saves_up_service_by_being_idle() -> None:
    queue = FairQueue()
    queue.append(make_group("busy", 1, tenant="busy"))
    queue.charge(take(queue), 1000, 0)
    queue.append(make_group("busy2", 1, tenant="busy"))
    queue.append(make_group("newcomer", 1, tenant="newcomer"))
    assert queue.counters["newcomer"] == queue.counters["busy"] == 1000


def test_a_newcomer_does_not_make_up_for_what_others_were_served_while_none_waited() -> None:
    queue = FairQueue()
    queue.append(make_group("alone", 1, tenant="busy"))
    queue.charge(take(queue), 1000, 0)
    queue.append(make_group("first", 1, tenant="newcomer"))
    queue.append(make_group("again", 1, tenant="busy"))
    assert queue.counters["newcomer"] == queue.counters["busy"] == 1000
