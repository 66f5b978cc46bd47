"""Which of several workers a waiting group goes to: to who has least to do, or its prefix, and not to nobody."""

from random import Random

import pytest
from fake_worker import FakeWorker
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import make_group, make_scheduler, run, step
from slow_balancer import CheckedBalancer
from workloads import random_config, random_request

from scheduler_service.core import (
    FairQueue,
    ModelOutput,
    PlacementReason,
    PreemptionMode,
    PriorityQueue,
    Scheduler,
    SchedulerOutput,
    SequenceGroup,
    SequenceStatus,
    WaitingQueue,
)
from scheduler_service.core.placement import MAX_OVERTAKES, MOST_LEFT
from scheduler_service.core.prefix_directory import PrefixDirectory

ROOMY = {"num_device_blocks": 400, "max_num_batched_tokens": 1000, "max_num_seqs": 64, "max_model_len": 1000}


def make_fleet(number: int, waiting: WaitingQueue | None = None, **sizes: object) -> list[Scheduler]:
    waiting = WaitingQueue() if waiting is None else waiting
    return [make_scheduler(waiting, **ROOMY | sizes) for _ in range(number)]


def add(fleet: list[Scheduler], *groups: SequenceGroup) -> None:
    for group in groups:
        fleet[0].add_request(group)


def taken(output: SchedulerOutput) -> list[str]:
    return [placement.group.request_id for placement in output.placements if placement.to is None]


def left(output: SchedulerOutput) -> dict[str, object]:
    return {placement.group.request_id: placement.to for placement in output.placements if placement.to is not None}


def reasons(output: SchedulerOutput) -> dict[str, PlacementReason]:
    return {placement.group.request_id: placement.reason for placement in output.placements}


def unlike(name: str, num_tokens: int = 6, **about: object) -> SequenceGroup:
    """A group that shares no prefix with any other."""
    return make_group(name, num_tokens, root=name.encode(), **about)  # type: ignore[arg-type]


def answer(scheduler: Scheduler, output: SchedulerOutput, now: float) -> None:
    scheduler.update_from_output(output, ModelOutput(output.step_id, [7] * output.num_samples), now)


def finish(scheduler: Scheduler) -> None:
    """Serve what there is for this worker, answering every step at once."""
    while not (output := scheduler.schedule()).is_empty:
        answer(scheduler, output, 0.0)


def finish_prompts(scheduler: Scheduler) -> None:
    """Serve what there is for this worker until it decodes."""
    while not scheduler.running or any(group.live[0].num_output_tokens < 2 for group in scheduler.running):
        answer(scheduler, scheduler.schedule(), 0.0)


def warm(scheduler: Scheduler, group: SequenceGroup) -> None:
    """Compute a group on this worker, so that its prefix is cached there."""
    others = [member.scheduler for member in scheduler.balancer._members.values() if member.scheduler is not scheduler]
    for other in others:
        other.set_admission(False)
    scheduler.add_request(group)
    finish(scheduler)
    for other in others:
        other.set_admission(True)


# ---- load


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


def test_what_does_not_divide_goes_to_whoever_comes_first() -> None:
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


# ---- prefixes


def test_a_group_is_left_to_the_worker_that_holds_its_prefix() -> None:
    other, holder = fleet = make_fleet(2)
    warm(holder, make_group("first", 100))
    add(fleet, make_group("again", 120))
    output = other.schedule()
    assert left(output) == {"again": holder}
    assert reasons(output) == {"again": PlacementReason.AFFINITY}
    (placement,) = holder.schedule().placements
    assert (placement.to, placement.reason, placement.cached_tokens) == (None, PlacementReason.AFFINITY, 100)


def test_the_longest_prefix_wins_among_those_that_hold_some() -> None:
    none, short, long = fleet = make_fleet(3)
    warm(short, make_group("short", 40))
    warm(long, make_group("long", 80))
    add(fleet, make_group("again", 120))
    assert left(none.schedule()) == {"again": long}
    assert left(short.schedule()) == {"again": long}
    assert taken(long.schedule()) == ["again"]


def test_only_blocks_in_a_row_are_a_prefix() -> None:
    directory, keys = PrefixDirectory(), [b"0", b"1", b"2", b"3"]
    for bit, held in ((1, "01"), (2, "0123"), (4, "013"), (8, "123"), (16, "0123")):
        for name in held:
            directory.add(name.encode(), bit)
    assert directory.holders(keys, 0, 0b1111) == 0b10
    assert directory.holders(keys, 0, 0b11111) == 0b10010
    assert directory.holders(keys, 0, 0b0101) == 0b0101
    assert directory.holders(keys, 1, 0b1101) == 0b1000
    assert directory.holders(keys, 0, 0b1000) == 0
    assert directory.holders(keys, 4, 0b1111) == 0


def test_a_prefix_does_not_outweigh_much_more_to_do() -> None:
    other, holder = fleet = make_fleet(2)
    warm(holder, make_group("first", 20))
    other.set_admission(False)
    add(fleet, *(unlike(str(i), max_tokens=100) for i in range(4)))
    holder.schedule()
    other.set_admission(True)
    add(fleet, make_group("again", 24))
    assert left(holder.schedule()) == {"again": other}
    assert taken(other.schedule()) == ["again"]


def test_of_several_that_hold_the_prefix_the_one_with_less_to_do_is_better() -> None:
    first, second = fleet = make_fleet(2)
    warm(first, make_group("first", 100))
    warm(second, make_group("second", 100))
    second.set_admission(False)
    add(fleet, unlike("other"))
    first.schedule()
    second.set_admission(True)
    add(fleet, make_group("again", 120))
    assert left(first.schedule()) == {"again": second}
    assert taken(second.schedule()) == ["again"]


def test_a_prefix_that_was_evicted_attracts_nobody() -> None:
    other, holder = fleet = make_fleet(2, num_device_blocks=30, max_model_len=120)
    warm(holder, make_group("first", 100))
    warm(holder, unlike("evicts", 119))
    add(fleet, make_group("again", 110))
    assert holder.blocks.num_cached_tokens(make_group("like", 110).live[0]) == 0
    output = other.schedule()
    assert PlacementReason.AFFINITY not in reasons(output).values()


def test_who_looks_past_a_group_takes_those_after_it() -> None:
    other, holder = fleet = make_fleet(2)
    warm(holder, make_group("first", 600))
    add(fleet, make_group("again", 700), *(unlike(str(i), 4) for i in range(2)))
    output = other.schedule()
    assert left(output)["again"] is holder
    assert taken(output)[0] == "0"
    assert fleet[0].waiting.get("again").num_overtaken == len(taken(output))


# ---- bounds


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


def test_nobody_is_overtaken_more_than_a_bounded_number_of_times() -> None:
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
    assert order.index("again") == group.num_overtaken == MAX_OVERTAKES
    assert other.balancer.num_overtakes == MAX_OVERTAKES
    assert other.balancer.num_placed[PlacementReason.OVERDUE] == 1


def test_a_worker_looks_past_a_bounded_number_of_groups() -> None:
    other, holder = fleet = make_fleet(2)
    warm(holder, make_group("first", 600))
    add(fleet, *(make_group(str(i), 700) for i in range(MOST_LEFT + 1)), unlike("own"))
    output = other.schedule()
    assert list(left(output)) == [str(i) for i in range(MOST_LEFT + 1)]
    assert taken(output) == []


def test_nobody_is_preempted_for_an_urgent_group_that_another_worker_has_room_for() -> None:
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


def test_nobody_looks_past_a_head_that_no_worker_has_room_for() -> None:
    fleet = make_fleet(2, num_device_blocks=24, max_model_len=90)
    add(fleet, *(unlike(name, 60, max_tokens=20) for name in ("a", "b")))
    assert [len(taken(scheduler.schedule())) for scheduler in fleet] == [1, 1]
    add(fleet, unlike("large", 80), unlike("small", 4))
    for scheduler in fleet:
        assert not scheduler.schedule().placements
    assert fleet[0].waiting.head.request_id == "large"


def test_nobody_of_another_priority_is_overtaken() -> None:
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


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32), st.integers(2, 5), st.sampled_from([WaitingQueue, PriorityQueue, FairQueue]))
def test_somebody_always_takes_a_group_that_there_is_room_for(
    seed: int, num_workers: int, policy: type[WaitingQueue]
) -> None:
    """If all who have room declined, nothing would ever go on; from one better worker to the next somebody takes it."""
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
            if group.is_suspect or group.num_overtaken >= MAX_OVERTAKES:
                continue
            able = {scheduler for scheduler in fleet if scheduler.room_for(group) is not None}
            placed = {scheduler: balancer.place(scheduler.member, group, len(waiting), now) for scheduler in able}
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
                scheduler.finish_requests(list(scheduler._by_id), SequenceStatus.FINISHED_ABORTED)
                answer(scheduler, output, now)
        balancer.check()


# ---- who is there


def test_a_drained_worker_is_left_nothing_and_gets_it_back() -> None:
    other, holder = fleet = make_fleet(2)
    warm(holder, make_group("first", 100))
    holder.set_admission(False)
    add(fleet, make_group("again", 120))
    assert taken(other.schedule()) == ["again"]
    holder.set_admission(True)
    add(fleet, make_group("third", 99))
    assert left(other.schedule()) == {"third": holder}


def test_a_lost_worker_is_left_nothing_and_its_prefixes_are_forgotten() -> None:
    other, holder = fleet = make_fleet(2)
    warm(holder, make_group("first", 100))
    assert len(other.balancer.directory) == 25
    add(fleet, make_group("again", 120))
    assert left(other.schedule()) == {"again": holder}
    holder.release_all()
    assert len(other.balancer.directory) == 0
    output = other.schedule()
    assert reasons(output) == {"again": PlacementReason.ALONE}
    another = make_scheduler(other.waiting, **ROOMY)
    assert another.member.slot == holder.member.slot
    assert len(other.balancer) == 2


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
    suspect = unlike("suspect")
    suspect.num_lost_steps = 2
    add(fleet, suspect, *(unlike(str(i)) for i in range(8)))
    output = busy.schedule()
    assert reasons(output)["suspect"] is PlacementReason.SUSPECT
    assert left(output)["suspect"] is idle
    assert "0" in taken(output)
    output = idle.schedule()
    assert taken(output) == ["suspect"]
    assert [scheduled.sequence.group for scheduled in output.scheduled] == [suspect]


# ---- swapped groups


def swapping_fleet() -> tuple[Scheduler, Scheduler, SequenceGroup]:
    """The first worker has swapped a group out and has no room to take it back in; the second one is free."""
    sizes: dict[str, object] = {
        "num_device_blocks": 8,
        "num_host_blocks": 16,
        "preemption_mode": PreemptionMode.SWAP,
        "max_model_len": 32,
        "prefill_tokens_per_second": 100,
    }
    full, free = fleet = make_fleet(2, **sizes)
    free.set_admission(False)
    groups = [unlike(name, 14, max_tokens=18) for name in "ab"]
    add(fleet, *groups)
    worker = FakeWorker(full.config)
    while not full.swapped:
        step(full, worker)
    free.set_admission(True)
    return full, free, groups[1]


def test_a_swapped_group_goes_where_it_is_computed_anew_sooner_than_it_has_waited() -> None:
    full, free, group = swapping_fleet()
    assert list(full.swapped) == [group]
    assert group.swapped_at == 0.0
    output = full.schedule(1.0)
    assert not output.moved
    answer(full, output, 1.0)
    output = full.schedule(100.0)
    (placement,) = output.moved
    assert (placement.group, placement.to) == (group, free)
    assert placement.seconds_there < 100.0
    assert group.sequences[0].id == 0
    assert output.preempted
    assert not full.swapped
    assert full.blocks.host.num_free == full.config.num_host_blocks
    assert full.waiting.head is group
    assert full.balancer.num_moved == 1
    assert taken(free.schedule(100.0)) == [group.request_id]


def test_a_swapped_group_stays_while_there_is_no_better_place() -> None:
    full, free, group = swapping_fleet()
    free.set_admission(False)
    output = full.schedule(100.0)
    assert not output.moved
    assert group in full.swapped


def test_a_group_that_has_moved_must_have_waited_twice_as_long_to_move_again() -> None:
    full, free, group = swapping_fleet()
    group.num_moves = 3
    (there, *_), *_ = full.balancer._others(full.member, group, 0.0, [free.member])
    answer(full, full.schedule(7.9 * there), 7.9 * there)
    assert group in full.swapped
    assert [placement.group for placement in full.schedule(8.1 * there).moved] == [group]
    assert group.num_moves == 4


def test_a_swapped_group_that_is_aborted_after_it_moved_leaves_nothing_behind() -> None:
    full, free, group = swapping_fleet()
    full.schedule(100.0)
    free.finish_requests([group.request_id], SequenceStatus.FINISHED_ABORTED)
    assert group.is_finished
    assert group.request_id not in full.waiting
    full.blocks.check()


def test_workers_that_nothing_tells_apart_are_no_error() -> None:
    """Two hold the same prefix, have nothing to do, and had no room when they were asked last."""
    waiting = WaitingQueue()
    holders = [
        make_scheduler(waiting, num_device_blocks=6, max_num_seqs=4, max_model_len=24),
        make_scheduler(waiting, num_device_blocks=6, max_num_seqs=4, max_model_len=24),
    ]
    third = make_scheduler(waiting, num_device_blocks=40, max_num_seqs=4, max_model_len=24)
    for holder in holders:
        for scheduler in (*holders, third):
            scheduler.set_admission(scheduler is holder)
        waiting.append(make_group(f"fill {holder.member.slot}", 20, root=b"p", max_tokens=3))
        for _ in range(2):
            answer(holder, holder.schedule(), 0.0)
    for scheduler in (*holders, third):
        scheduler.set_admission(True)
    waiting.append(make_group("other", 20, root=b"z", max_tokens=2))
    assert taken(third.schedule()) == ["other"]
    for holder in holders:
        answer(holder, holder.schedule(), 0.0)
        assert not holder.running
    assert [holder.member.entry for holder in holders] == [-1, -1]
    waiting.append(make_group("same prefix", 20, root=b"p", max_tokens=2))
    assert list(left(third.schedule())) == ["same prefix"]
