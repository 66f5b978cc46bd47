"""What a group that is left to a better worker can lose: time, its place in the queue, never a worker that takes it."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from placement_helpers import ROOMY, add, answer, finish_prompts, left, make_fleet, reasons, taken, unlike, warm
from scheduler_helpers import make_group, make_scheduler
from slow_balancer import CheckedBalancer
from workloads import random_config, random_request

from scheduler_service.core import (
    FairQueue,
    Placement,
    PlacementReason,
    PriorityQueue,
    Scheduler,
    SchedulerOutput,
    SequenceStatus,
    WaitingQueue,
    WorkerScheduler,
)
from scheduler_service.core.placement.balancer import MAX_OVERTAKES
from scheduler_service.core.placement.choice import Here
from scheduler_service.core.queues.waiting_queue import MAX_LEFT


def test_a_group_is_left_for_no_longer_than_that_would_save() -> None:
    other, holder = fleet = make_fleet(2)
    warm(holder, make_group("first", 100))
    add(fleet, make_group("again", 120))
    output = other.schedule(10.0)
    (placement,) = output.placements
    assert output.ask_again_at == 10.0 + (placement.seconds - placement.seconds_there)
    assert left(other.schedule(output.ask_again_at)) == {"again": holder}
    output = other.schedule(output.ask_again_at + 1e-6)
    assert reasons(output) == {"again": PlacementReason.OVERDUE}
    assert taken(output) == ["again"]


def test_a_group_that_comes_back_may_be_left_anew() -> None:
    other, holder = fleet = make_fleet(2)
    warm(holder, make_group("first", 100))
    add(fleet, make_group("again", 120))
    output = other.schedule(10.0)
    assert output.ask_again_at is not None
    assert taken(other.schedule(20.0)) == ["again"]
    other.release_all()
    third = make_scheduler(other.waiting, **ROOMY)
    assert left(third.schedule(30.0)) == {"again": holder}


def test_no_group_is_overtaken_more_than_a_bounded_number_of_times() -> None:
    """The worker with its prefix never asks, and time stands still."""
    other, holder = fleet = make_fleet(2)
    warm(holder, make_group("first", 600))
    add(fleet, make_group("again", 700))
    group = fleet[0].waiting.head
    order: list[str] = []
    for number in range(3 * MAX_OVERTAKES):
        add(fleet, unlike(str(number), 1, max_tokens=1))
        output = other.schedule()
        order += taken(output)
        if not output.is_empty:
            answer(other, output, 0.0)
    assert order.index("again") == group.placement.num_overtaken == MAX_OVERTAKES
    assert other.balancer.num_overtakes == MAX_OVERTAKES
    assert other.balancer.num_placed[PlacementReason.OVERDUE] == 1


def test_a_worker_looks_past_a_bounded_number_of_groups() -> None:
    other, holder = fleet = make_fleet(2)
    warm(holder, make_group("first", 600))
    add(fleet, *(make_group(str(i), 700) for i in range(MAX_LEFT + 1)), unlike("own"))
    output = other.schedule()
    assert list(left(output)) == [str(i) for i in range(MAX_LEFT + 1)]
    assert taken(output) == []


def test_no_group_is_preempted_for_an_urgent_one_that_another_worker_has_room_for() -> None:
    full, free = fleet = make_fleet(2, PriorityQueue(), num_device_blocks=24, max_model_len=90)
    free.set_admission(False)
    add(fleet, unlike("patient", 60, max_tokens=20))
    finish_prompts(full)
    free.set_admission(True)
    add(fleet, unlike("urgent", 60, priority=-9), unlike("small", 4, priority=-9))
    output = full.schedule(1.0)
    assert reasons(output) == {"urgent": PlacementReason.ROOM}
    assert left(output) == {"urgent": free}
    assert not output.preempted
    assert output.ask_again_at is not None
    answer(full, output, 1.5)
    output = full.schedule(output.ask_again_at + 0.01)
    assert output.preempted
    assert taken(output) == ["urgent"]


def test_no_worker_looks_past_a_head_that_none_has_room_for() -> None:
    fleet = make_fleet(2, num_device_blocks=24, max_model_len=90)
    add(fleet, *(unlike(name, 60, max_tokens=20) for name in ("a", "b")))
    assert [len(taken(scheduler.schedule())) for scheduler in fleet] == [1, 1]
    add(fleet, unlike("large", 80), unlike("small", 4))
    for scheduler in fleet:
        assert not scheduler.schedule().placements
    assert fleet[0].waiting.head.request_id == "large"


def test_no_group_of_another_priority_is_overtaken() -> None:
    other, holder = fleet = make_fleet(2, PriorityQueue())
    warm(holder, make_group("first", 600))
    add(fleet, make_group("urgent", 700, priority=-5), unlike("patient", priority=0))
    assert taken(other.schedule()) == []
    add(fleet, unlike("as urgent", 4, priority=-5))
    assert taken(other.schedule()) == ["as urgent"]
    assert taken(holder.schedule())[0] == "urgent"


def test_a_tenant_whose_group_is_left_stays_next() -> None:
    other, holder = fleet = make_fleet(2, FairQueue())
    warm(holder, make_group("first", 600, tenant="a"))
    fleet[0].waiting.charge(unlike("x", tenant="b"), 5000, 0)
    add(fleet, make_group("left", 700, tenant="a"), unlike("b", 4, tenant="b"), unlike("a", 4, tenant="a"))
    output = other.schedule()
    assert "left" in left(output)
    assert taken(output)[0] == "a"
    assert fleet[0].waiting.head.request_id == "left"


def test_tenants_that_were_served_less_overtake_no_other_however_many_groups_they_bring() -> None:
    """It is their turn. Only what goes before a group because that was left to another worker counts as an overtake."""
    other, holder = fleet = make_fleet(2, FairQueue(), max_num_seqs=2)
    warm(holder, make_group("first", 600, tenant="a"))
    add(fleet, unlike("runs", tenant="a"))
    assert taken(holder.schedule()) == ["runs"]
    add(fleet, make_group("left", 700, tenant="a"), unlike("own", 1, tenant="a"))
    group = fleet[0].waiting.head
    names = [str(number) for number in range(2 * MAX_OVERTAKES)]
    add(fleet, *(unlike(name, 1, max_tokens=1, tenant="served less") for name in names))
    fleet[0].waiting.charge(group, 5000, 0)
    order: list[str] = []
    while order != names:
        output = other.schedule()
        order += taken(output)
        answer(other, output, 0.0)
        assert order == names[: len(order)]
    assert group.placement.num_overtaken == 0
    assert taken(other.schedule()) == ["own"]
    assert group.placement.num_overtaken == 1


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), st.integers(2, 5), st.sampled_from([WaitingQueue, PriorityQueue, FairQueue]))
def test_some_worker_always_takes_a_group_that_there_is_room_for(
    seed: int, num_workers: int, policy: type[WaitingQueue]
) -> None:
    """If all workers with room declined, nothing would ever go on; from one better worker to the next, one takes it."""
    rng = Random(seed)
    waiting = policy()
    waiting.balancer = balancer = CheckedBalancer()
    config = random_config(rng, (8, 12, 24, 60))
    fleet = [Scheduler(config, waiting) for _ in range(num_workers)]
    for scheduler in fleet:
        scheduler.member.slowness.speed = rng.choice([1000, 1000, 300, 2500])
    in_flight: dict[Scheduler, list[SchedulerOutput]] = {scheduler: [] for scheduler in fleet}
    for now in range(40):
        if rng.random() < 0.4:
            waiting.append(random_request(rng, now).group(now))
        for group in waiting:
            if group.is_suspect or group.placement.num_overtaken >= MAX_OVERTAKES:
                continue
            able = {scheduler for scheduler in fleet if scheduler.room_for(group) is not None}
            placed: dict[WorkerScheduler, Placement] = {}
            for scheduler in able:
                member = scheduler.member
                offers = balancer.offers(member=member, group=group, here=Here.HAS_ROOM, now=now)
                chosen = balancer.choose(member=member, group=group, offers=offers, now=now, num_waiting=len(waiting))
                assert chosen is not None
                placed[scheduler] = chosen
            for placement in placed.values():
                for _ in able:
                    placement = placed[placement.to] if placement.to is not None else placement
                assert placement.to is None
        scheduler = rng.choice(fleet)
        if len(in_flight[scheduler]) < 2:
            output = scheduler.schedule(now)
            if not output.is_empty:
                in_flight[scheduler].append(output)
        if len(in_flight[scheduler]) > rng.randrange(2):
            output = in_flight[scheduler].pop(0)
            if not any(sequence.group.beams for sequence, *_ in output.scheduled):
                answer(scheduler, output, now + 0.01 * rng.random())
            else:
                scheduler.finish_requests(
                    [group.request_id for group in (*scheduler.running, *scheduler.swapped)],
                    SequenceStatus.FINISHED_ABORTED,
                )
                answer(scheduler, output, now)
        balancer.check()
