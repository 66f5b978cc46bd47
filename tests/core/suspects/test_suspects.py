"""Groups that workers are lost to: suspected, tried alone, elsewhere, and ended; and the innocent ones beside them."""

from collections.abc import Callable, Iterable
from random import Random

import pytest
from fake_worker import FakeWorker, reference_output
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run, step, suspect
from storm import Kills, Storm

from scheduler_service.core import (
    PreemptionMode,
    Scheduler,
    SequenceGroup,
    SequenceStatus,
    WaitingQueue,
)
from scheduler_service.core.groups.suspicion import CLEARING_TOKENS
from scheduler_service.core.placement.balancer import MAX_OVERTAKES
from scheduler_service.core.suspects.rule import CONTROL, MAX_CONTROL_SECONDS, NOTICE_SECONDS


def immediately(poison: SequenceGroup) -> Kills:
    return lambda group, *_: group is poison


def after_gaining(num_tokens: int) -> Callable[[SequenceGroup], Kills]:
    """On each worker anew."""
    return lambda poison: lambda group, computed, came_with: group is poison and computed >= came_with + num_tokens


def with_its_output_token(number: int) -> Callable[[SequenceGroup], Kills]:
    """Always the same one, which is so never gained."""

    def kills(poison: SequenceGroup) -> Kills:
        position = len(poison.prompt_token_ids) + number
        return lambda group, computed, _: group is poison and computed >= position

    return kills


# With the workers that are lost to it in company: one that gains a token alone goes back among the others once.
POISONS = [
    (immediately, 2),
    (after_gaining(0), 2),
    *((after_gaining(number), 3) for number in range(1, CLEARING_TOKENS)),
    (with_its_output_token(2), 2),
    (with_its_output_token(30), 2),
]


def make_groups(random: Random, count: int) -> list[SequenceGroup]:
    return [
        make_group(
            str(number),
            random.randrange(1, 80),
            root=number.to_bytes(4, "big"),
            max_tokens=random.randrange(35, 60),
            n=random.choice([1, 1, 1, 2]),
        )
        for number in range(count)
    ]


def check_outputs(groups: Iterable[SequenceGroup]) -> None:
    for group in groups:
        for index in range(group.sampling.n):
            assert output_of(group, index) == reference_output(group, index, 400)


@pytest.mark.parametrize(("kind", "num_in_company"), POISONS)
@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_a_calm_fleet_finds_a_poison_by_three_workers_that_are_lost_with_it_alone(
    num_workers: int, kind: Callable[[SequenceGroup], Kills], num_in_company: int
) -> None:
    """After two or three in company. All others get what they would have got without it."""
    groups = make_groups(Random(num_workers), 30)
    poison = groups[10]
    fleet = Storm(Random(0), num_workers, kills=kind(poison))
    fleet.run(groups)
    assert (fleet.ended, fleet.num_losses) == ([poison], num_in_company + 3)
    assert poison.error is not None
    assert poison.error.startswith(f"{fleet.num_losses} workers failed in a row while computing this request")
    assert {sequence.status for sequence in poison.sequences} == {SequenceStatus.FINISHED_ABORTED}
    check_outputs(group for group in groups if group is not poison)


@pytest.mark.parametrize("kind", [kind for kind, _ in POISONS])
def test_a_poison_that_is_the_only_request_is_found_after_four_workers(kind: Callable[[SequenceGroup], Kills]) -> None:
    poison = make_group("poison", 6, max_tokens=50)
    fleet = Storm(Random(0), 2, kills=kind(poison))
    fleet.run([poison])
    assert (fleet.ended, fleet.num_losses) == ([poison], 4)


@pytest.mark.parametrize(
    ("kill_every", "num_workers", "restart"),
    [(3.0, 2, 6.0), (3.0, 2, 0.5), (1.0, 2, 2.0), (0.3, 8, 3.0), (3.0, 1, 1.0), (0.7, 1, 0.2)],
)
@pytest.mark.parametrize("is_regular", [True, False])
def test_a_storm_of_kills_ends_no_request(
    kill_every: float, num_workers: int, restart: float, *, is_regular: bool
) -> None:
    """It breaks over a fleet that was calm until then, or at its first step."""
    rng = Random(int(100 * kill_every) + is_regular)
    groups = make_groups(rng, 1000)
    storm = Storm(
        rng,
        num_workers,
        restart=restart,
        storm_from=4.0 * is_regular,
        most_requests=12,
        kill_every=lambda: kill_every if is_regular else rng.expovariate(1 / kill_every),
    )
    storm.run(groups, lambda: storm.now > 4.0 + max(12.0, 10 * kill_every))
    assert storm.num_losses > 4
    assert storm.ended == []
    finished = [group for group in groups if group.is_finished]
    assert len(finished) > 20
    check_outputs(finished)


@pytest.mark.parametrize("kind", [kind for kind, _ in POISONS])
def test_a_poison_beside_the_storm_is_found(kind: Callable[[SequenceGroup], Kills]) -> None:
    rng = Random(3)
    groups = make_groups(rng, 1000)
    poison = groups[30]
    storm = Storm(rng, 2, kills=kind(poison), kill_every=lambda: rng.expovariate(1 / 3))
    storm.run(groups, lambda: storm.now > 1000.0 or poison.is_finished)
    assert storm.ended == [poison]
    assert poison.suspicion is not None
    assert poison.suspicion.num_losses <= 12


def test_a_poison_that_joins_while_an_answer_is_on_its_way_is_found_too() -> None:
    """The worker dies in the second step in flight, before its answer to the first has left it."""
    waiting = WaitingQueue()
    innocent, poison = (make_group(name, 6, root=name.encode(), max_tokens=5) for name in ("innocent", "poison"))
    waiting.append(innocent)
    scheduler = make_scheduler(waiting)
    scheduler.schedule()
    waiting.append(poison)
    assert plan(scheduler.schedule()) == {"innocent": [1], "poison": [6]}
    scheduler.release_all()
    assert [group.suspicion and group.suspicion.num_losses for group in (poison, innocent)] == [1, 1]


def test_a_suspect_that_waits_does_not_hold_up_a_drained_worker() -> None:
    waiting = WaitingQueue()
    scheduler = make_scheduler(waiting)
    worker = FakeWorker(scheduler.config)
    running, suspected = make_group("running", 6), suspect(make_group("suspect", 6))
    waiting.append(running)
    step(scheduler, worker)
    scheduler.set_admission(False)
    waiting.append(suspected)
    run(scheduler, worker)
    assert output_of(running) == reference_output(running, 0, 64)
    assert suspected.request_id in waiting


def test_a_suspect_that_is_preempted_does_not_come_back_among_the_others() -> None:
    """Swapped out, it would be resumed in a step with groups that run."""
    scheduler = make_scheduler(
        num_device_blocks=6, num_host_blocks=16, preemption_mode=PreemptionMode.SWAP, max_model_len=64
    )
    worker = FakeWorker(scheduler.config)
    suspected = suspect(make_group("suspect", 7, root=b"s", max_tokens=8), 3)
    for group in (make_group("a", 3, root=b"a", max_tokens=20), make_group("b", 9, root=b"b", max_tokens=5)):
        scheduler.add_request(group)
        step(scheduler, worker)
    scheduler.add_request(suspected)
    num_steps_alone = 0
    while scheduler.has_work:
        was_suspect = suspected.is_suspect
        if was_suspect and "suspect" in (planned := plan(step(scheduler, worker))):
            assert list(planned) == ["suspect"]
            num_steps_alone += 1
        elif not was_suspect:
            step(scheduler, worker)
    assert scheduler.num_preemptions[PreemptionMode.RECOMPUTE] > 0
    assert num_steps_alone >= CLEARING_TOKENS
    assert output_of(suspected) == reference_output(suspected, 0, 64)


def test_a_suspect_that_there_is_no_room_for_holds_no_group_up() -> None:
    """Groups that run go on ahead of the answers, as long as it could not take their place."""
    scheduler = make_scheduler(max_num_seqs=1)
    worker = FakeWorker(scheduler.config)
    running, suspected = make_group("running", 6, max_tokens=5), suspect(make_group("suspect", 6, root=b"s"))
    scheduler.add_request(running)
    step(scheduler, worker)
    scheduler.add_request(suspected)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert plan(first) == plan(second) == {"running": [1]}
    for output in (first, second):
        scheduler.update_from_output(output, worker.execute(output))
    run(scheduler, worker)
    assert output_of(suspected) == reference_output(suspected, 0, 64)


@pytest.mark.parametrize("num_device_blocks", [400, 120])
def test_a_flaky_worker_ends_no_request_while_a_sound_one_is_there(num_device_blocks: int) -> None:
    """It answers one step and is lost in the next, again and again, and has room whenever the sound one has none.

    In the smaller pool the sound one has swapped groups most of the time, and takes no group then.
    """
    waiting = WaitingQueue()

    def start(worker: str, now: float = 0.0) -> tuple[Scheduler, FakeWorker]:
        scheduler = make_scheduler(
            waiting,
            worker,
            now=now,
            num_device_blocks=num_device_blocks,
            num_host_blocks=400,
            preemption_mode=PreemptionMode.SWAP,
            max_num_seqs=4,
            max_model_len=400,
        )
        return scheduler, FakeWorker(scheduler.config)

    good, good_worker = start("good")
    groups = [make_group(f"long {i}", 6, root=bytes([i]), max_tokens=300) for i in range(4)]
    groups += [make_group(str(i), 6, root=bytes([50 + i]), max_tokens=40) for i in range(12)]
    for group in groups[:4]:
        waiting.append(group)
    step(good, good_worker)
    for group in groups[4:]:
        waiting.append(group)
    num_losses = 0
    for tick in range(400):
        if all(group.is_finished for group in groups):
            break
        bad, bad_worker = start("bad", tick / 10)
        output = bad.schedule(tick / 10)
        if not output.is_empty:
            bad.update_from_output(output, bad_worker.execute(output), tick / 10)
            bad.schedule(tick / 10)
        num_losses += bool(bad.steps_in_flight)
        assert bad.release_all(tick / 10 + 0.001) == []
        for _ in range(5):
            step(good, good_worker)
    assert num_losses > 3
    assert (good.num_preemptions[PreemptionMode.SWAP] > 0) is (num_device_blocks < 400)
    for group in groups:
        assert output_of(group) == reference_output(group, 0, 400)


def test_a_suspect_waits_for_a_worker_that_was_not_lost_with_it_and_holds_no_group_up() -> None:
    waiting = WaitingQueue()
    tried, untried = make_scheduler(waiting, "tried"), make_scheduler(waiting, "untried", max_num_seqs=1)
    tried.set_admission(False)
    long, suspected = make_group("long", 6, max_tokens=40), suspect(make_group("suspect", 6, root=b"s"), 2, "tried")
    waiting.append(long)
    worker = FakeWorker(untried.config)
    step(untried, worker)
    tried.set_admission(True)
    waiting.append(suspected)
    for number in range(2 * MAX_OVERTAKES):  # more than may overtake any other group
        waiting.append(make_group(str(number), 6, root=bytes([number]), max_tokens=1))
    run_until_idle(tried)
    assert list(waiting) == [suspected]
    output = tried.schedule(1.0)
    assert output.is_empty
    assert output.ask_again_at is None  # it would be asked in vain
    assert [placement.to for placement in output.placements] == [untried]
    while suspected.request_id in waiting:
        step(untried, worker)
    assert suspected in untried.running


def test_a_suspect_that_has_nowhere_else_to_go_comes_back_and_is_ended() -> None:
    waiting = WaitingQueue()
    other = make_scheduler(waiting, "other")
    other.set_admission(False)
    suspect = make_group("suspect", 6)
    waiting.append(suspect)
    for num_losses in (1, 2, 3, 4):
        now = 100.0 * num_losses
        scheduler = make_scheduler(waiting, "only", now=now)
        assert plan(scheduler.schedule(now)) == {"suspect": [6]}
        assert scheduler.release_all(now + 0.01) == ([suspect] if num_losses == 4 else [])


def test_a_suspect_that_was_lost_with_all_workers_goes_to_any_but_the_last() -> None:
    """However often one of them is up again first: what it is ended for is not one worker's doing alone."""
    waiting = WaitingQueue()
    first, second = make_scheduler(waiting, "first"), make_scheduler(waiting, "second")
    waiting.append(suspect(make_group("suspect", 6), 2, "first", "second"))
    output = second.schedule(1.0)
    assert output.is_empty
    assert [placement.to for placement in output.placements] == [first]
    assert plan(first.schedule(1.0)) == {"suspect": [6]}


@pytest.mark.parametrize("seconds", [0.01, 0.5])
def test_a_suspect_waits_until_another_loss_would_prove_something_and_holds_no_group_up(seconds: float) -> None:
    """That is a time of other steps, in proportion to its own, and of not too long a time."""
    waiting = WaitingQueue()
    group = make_group("suspect", 6, root=b"s")
    waiting.append(group)
    now = 0.0
    for _ in range(3):
        scheduler = make_scheduler(waiting, now=now)
        scheduler.schedule(now)
        now += seconds
        assert scheduler.release_all(now) == []
    scheduler = make_scheduler(waiting, now=now)
    worker = FakeWorker(scheduler.config)
    waiting.append(make_group("other", 6, max_tokens=2))
    for planned in ({"other": [6]}, {"other": [1]}):
        output = scheduler.schedule(now)
        assert plan(output) == planned
        scheduler.update_from_output(output, worker.execute(output), now)
    output = scheduler.schedule(now)  # tells the worker that the other one has ended
    scheduler.update_from_output(output, worker.execute(output), now)
    output = scheduler.schedule(now)
    assert output.is_empty
    assert output.ask_again_at is not None
    wanted = CONTROL * 3 * (seconds + NOTICE_SECONDS)
    assert output.ask_again_at - now == pytest.approx(min(wanted, MAX_CONTROL_SECONDS))
    assert scheduler.schedule(output.ask_again_at - 0.1).is_empty
    assert plan(scheduler.schedule(output.ask_again_at + 0.001)) == {"suspect": [6]}


def test_a_suspect_is_not_left_to_a_worker_that_was_lost_with_it() -> None:
    """However much better it is there."""
    waiting = WaitingQueue()
    tried, untried = make_scheduler(waiting, "tried"), make_scheduler(waiting, "untried")
    tried.set_admission(False)
    waiting.append(make_group("long", 6, max_tokens=40))
    worker = FakeWorker(untried.config)
    step(untried, worker)
    tried.set_admission(True)
    suspected = suspect(make_group("suspect", 6, root=b"s"), 2, "tried")
    waiting.append(suspected)
    assert plan(untried.schedule()) == {"suspect": [6]}


def run_until_idle(scheduler: Scheduler) -> None:
    worker = FakeWorker(scheduler.config)
    while not step(scheduler, worker).is_empty:
        pass
