"""Which worker a waiting group goes to where no prefix counts: the one with least to do, or with least to lose."""

from random import Random

import pytest
from fake_worker import FakeWorker
from placement_helpers import add, answer, finish, finish_prompts, left, make_fleet, reasons, taken, unlike
from scheduler_helpers import make_group, run, step, suspect

from scheduler_service.core import FairQueue, PlacementReason, PriorityQueue, Scheduler, SchedulerOutput, WaitingQueue


@pytest.mark.parametrize("queue", [WaitingQueue, PriorityQueue, FairQueue])
def test_each_worker_takes_its_share_of_a_burst_in_its_first_step(queue: type[WaitingQueue]) -> None:
    fleet = make_fleet(3, queue())
    add(fleet, *(unlike(str(i)) for i in range(12)))
    assert [len(taken(scheduler.schedule())) for scheduler in fleet] == [4, 4, 4]
    assert not fleet[0].waiting


def test_a_request_that_is_the_only_one_waits_for_the_worker_that_has_had_nothing_for_longest() -> None:
    """Also while yet another worker is so busy that this one would still have its share."""
    busy, idle, fresh = fleet = make_fleet(3)
    for scheduler in (idle, fresh):
        scheduler.set_admission(False)
    add(fleet, *(unlike(str(i), max_tokens=50) for i in range(6)))
    finish_prompts(busy)
    for scheduler in (fresh, idle):
        scheduler.set_admission(True)
    add(fleet, unlike("new"))
    assert left(idle.schedule()) == {"new": fresh}
    assert taken(fresh.schedule()) == ["new"]


def test_what_does_not_divide_goes_to_the_worker_that_comes_first() -> None:
    fleet = make_fleet(3)
    add(fleet, *(unlike(str(i)) for i in range(7)))
    rounds = [[len(taken(scheduler.schedule())) for scheduler in fleet] for _ in range(2)]
    assert [sum(counts) for counts in zip(*rounds, strict=True)] in ([3, 2, 2], [2, 3, 2], [2, 2, 3])


def test_requests_that_come_one_at_a_time_do_not_all_go_to_the_worker_that_is_asked_first() -> None:
    fleet = make_fleet(4)
    counts = dict.fromkeys(fleet, 0)
    for number in range(12):
        group = unlike(str(number), max_tokens=1)
        add(fleet, group)
        for scheduler in fleet:
            output = scheduler.schedule()
            counts[scheduler] += len(taken(output))
            if not output.is_empty:
                answer(scheduler, output, 0.0)
                finish(scheduler)
        assert group.is_finished
    assert list(counts.values()) == [3, 3, 3, 3]


def test_a_worker_with_less_to_do_is_left_the_group_and_takes_it() -> None:
    busy, idle = fleet = make_fleet(2)
    idle.set_admission(False)
    add(fleet, *(unlike(str(i)) for i in range(4)))
    busy.schedule()
    idle.set_admission(True)
    add(fleet, unlike("new"))
    output = busy.schedule()
    assert (taken(output), left(output)) == ([], {"new": idle})
    assert output.ask_again_at is not None
    output = idle.schedule()
    assert reasons(output) == {"new": PlacementReason.LOAD}
    assert taken(output) == ["new"]
    assert fleet[0].balancer.num_left[PlacementReason.LOAD] == 1
    assert fleet[0].balancer.num_placed[PlacementReason.LOAD] == 1


def test_prompts_under_way_are_work() -> None:
    """One long prompt against three short ones that have been computed."""
    busy, idle = fleet = make_fleet(2, max_num_batched_tokens=500)
    add(fleet, unlike("long", 900), *(unlike(str(i)) for i in range(3)))
    assert taken(busy.schedule()) == ["long"]
    assert taken(idle.schedule()) == ["0", "1", "2"]
    add(fleet, unlike("new"))
    assert left(busy.schedule()) == {"new": idle}
    assert taken(idle.schedule()) == ["new"]


def test_a_slow_worker_beside_fast_ones_gets_less() -> None:
    """It takes four times as long for every step; each is asked whenever it has answered, as workers are."""
    fleet = make_fleet(3)
    seconds = dict(zip(fleet, (0.04, 0.01, 0.01), strict=True))
    counts = dict.fromkeys(fleet, 0)
    in_flight: dict[Scheduler, tuple[float, SchedulerOutput]] = {}
    rng, number = Random(0), 0
    for tick in range(4000):
        now = tick / 1000
        if rng.random() < 0.1:
            add(fleet, unlike(str(number := number + 1), 20, max_tokens=30))
        for scheduler in rng.sample(fleet, 3):
            if scheduler in in_flight and in_flight[scheduler][0] <= now:
                answer(scheduler, in_flight.pop(scheduler)[1], now)
            if scheduler not in in_flight:
                output = scheduler.schedule(now)
                counts[scheduler] += len(taken(output))
                if not output.is_empty:
                    in_flight[scheduler] = now + seconds[scheduler], output
    slow, *fast = counts.values()
    assert sum(counts.values()) > 0.9 * number
    assert 0 < slow < min(fast) / 2
    assert abs(fast[0] - fast[1]) < 0.2 * sum(fast)


def test_a_fast_worker_is_better_though_it_has_more_to_do() -> None:
    slow, fast = fleet = make_fleet(2)
    slow.member.slowness.speed = 250
    slow.set_admission(False)
    add(fleet, unlike("runs", max_tokens=100))
    finish_prompts(fast)
    slow.set_admission(True)
    add(fleet, unlike("new", 100))
    output = slow.schedule()
    assert left(output) == {"new": fast}
    assert output.placements[0].seconds > 1.5 * output.placements[0].seconds_there


def test_a_worker_without_room_is_not_asked_again_before_it_has_another_amount_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    *full, free = fleet = make_fleet(6, num_device_blocks=24, max_model_len=90)
    free.set_admission(False)
    add(fleet, *(unlike(name, 60, max_tokens=20) for name in "abcde"))
    for scheduler in full:
        finish_prompts(scheduler)
    free.set_admission(True)
    asked: list[object] = []
    room_for = Scheduler.room_for
    monkeypatch.setattr(Scheduler, "room_for", lambda self, group: asked.append(self) or room_for(self, group))
    add(fleet, *(unlike(str(i), 36, max_tokens=1) for i in range(2)))
    assert taken(free.schedule()) == ["0", "1"]
    assert len(asked) <= len(full)


def test_a_worker_that_is_overdue_is_expected_to_be_so_for_as_long_again() -> None:
    hung, other = fleet = make_fleet(2)
    other.set_admission(False)
    add(fleet, unlike("a"))
    hung.schedule(0.0)
    other.set_admission(True)
    other.add_request(unlike("b"))
    assert taken(other.schedule(0.0)) == ["b"]
    assert other.balancer._seconds_in_flight(hung.member, 1.0, 0.0) < 0.01
    assert other.balancer._seconds_in_flight(hung.member, 1.0, 60.0) > 59


def test_a_worker_alone_has_no_choice_and_spends_nothing_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitingQueue().balancer.__class__, "_others", None)
    (scheduler,) = make_fleet(1)
    add([scheduler], *(make_group(str(i), 6) for i in range(5)))
    worker = FakeWorker(scheduler.config)
    output = step(scheduler, worker)
    assert set(reasons(output).values()) == {PlacementReason.ALONE}
    run(scheduler, worker)


def test_a_suspect_goes_where_there_is_least_to_lose() -> None:
    """Also when the worker that is asked would have its share of those that wait."""
    busy, idle = fleet = make_fleet(2)
    idle.set_admission(False)
    add(fleet, unlike("runs", max_tokens=50))
    finish_prompts(busy)
    idle.set_admission(True)
    suspected = suspect(unlike("suspect"))
    add(fleet, suspected, *(unlike(str(i)) for i in range(8)))
    output = busy.schedule()
    assert reasons(output)["suspect"] is PlacementReason.SUSPECT
    assert left(output)["suspect"] is idle
    assert "0" in taken(output)
    output = idle.schedule()
    assert taken(output) == ["suspect"]
    assert [scheduled.sequence.group for scheduled in output.scheduled] == [suspected]
