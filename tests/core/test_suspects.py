"""Groups that workers are lost to: suspected, tried alone, elsewhere, and ended; and the innocent ones beside them."""

from random import Random

import pytest
from fake_worker import FakeWorker, reference_output
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run, step, suspect

from scheduler_service.core import (
    ModelOutput,
    PreemptionMode,
    Scheduler,
    SchedulerOutput,
    SequenceGroup,
    SequenceStatus,
    WaitingQueue,
)
from scheduler_service.core.placement import MAX_OVERTAKES
from scheduler_service.core.suspicion import CLEARING_TOKENS, Suspicion


def test_a_request_that_brings_workers_down_ends_alone_and_the_others_finish() -> None:
    """Five requests are in the step that a worker is lost in, again and again; only one of them is the reason."""
    waiting = WaitingQueue()
    groups = [make_group(name, 6, n=n, max_tokens=5) for name, n in (("a", 1), ("b", 2), ("poison", 1), ("c", 3))]
    poison = groups[2]
    scheduler = make_scheduler(waiting)
    for group in groups:
        scheduler.add_request(group)
    worker = FakeWorker(scheduler.config)
    num_losses = 0
    while scheduler.has_work:
        output = scheduler.schedule()
        scheduler.blocks.check()
        if poison.request_id in plan(output) and poison.sequences[0].num_output_tokens == 2:
            num_losses += 1
            ended = scheduler.release_all()
            assert ended == ([poison] if num_losses == 4 else [])
            scheduler = make_scheduler(waiting)
            worker = FakeWorker(scheduler.config)
        elif not output.is_empty:
            scheduler.update_from_output(output, worker.execute(output))
    assert num_losses == 4
    assert poison.error == "4 workers failed in a row while computing this request"
    assert poison.sequences[0].status is SequenceStatus.FINISHED_ABORTED
    for group in (groups[0], groups[1], groups[3]):
        for index in range(group.sampling.n):
            assert output_of(group, index) == reference_output(group, index, 64)


def test_a_worker_that_is_lost_again_and_again_ends_nobody_who_gains_enough_tokens() -> None:
    waiting = WaitingQueue()
    group = make_group("a", 6, max_tokens=40)
    waiting.append(group)
    while not group.is_finished:
        scheduler = make_scheduler(waiting)
        worker = FakeWorker(scheduler.config)
        for _ in range(CLEARING_TOKENS):
            step(scheduler, worker)
        if not group.is_finished:
            scheduler.schedule()
            assert scheduler.release_all() == []
    assert output_of(group) == reference_output(group, 0, 64)


@pytest.mark.parametrize(("num_tokens", "num_losses"), [(0, 3), (1, 4), (CLEARING_TOKENS - 1, 4)])
def test_who_is_alone_with_every_worker_it_is_lost_to_is_ended(num_tokens: int, num_losses: int) -> None:
    waiting = WaitingQueue()
    group = make_group("a", 6, max_tokens=400)
    waiting.append(group)
    ended: list[list[SequenceGroup]] = []
    while not group.is_finished:
        scheduler = make_scheduler(waiting, num_device_blocks=100, max_model_len=400)
        worker = FakeWorker(scheduler.config)
        for _ in range(num_tokens):
            step(scheduler, worker)
        scheduler.schedule()
        ended.append(scheduler.release_all())
    assert ended == [[]] * (num_losses - 1) + [[group]]
    assert group.error == f"{num_losses} workers failed in a row while computing this request"


def test_who_was_in_company_in_all_losses_but_one_is_not_ended() -> None:
    """That one may be chance: a suspect has steps of its own, and workers are lost in whatever step they are in."""
    waiting = WaitingQueue()
    innocent, other = make_group("innocent", 6, root=b"i", max_tokens=9), make_group("other", 6, max_tokens=9)
    for group in (innocent, other):
        waiting.append(group)
    for expected in ({"innocent", "other"}, {"innocent", "other"}, {"innocent"}):
        scheduler = make_scheduler(waiting)
        assert set(plan(scheduler.schedule())) == expected
        assert scheduler.release_all() == []
    scheduler = make_scheduler(waiting)
    run(scheduler, FakeWorker(scheduler.config))
    for group in (innocent, other):
        assert output_of(group) == reference_output(group, 0, 64)


def test_a_suspect_stays_alone_for_longer_after_each_lost_step() -> None:
    suspicion = Suspicion()
    found: list[int] = []
    for _ in range(4):
        suspicion.lose("worker", alone=False)
        num_tokens = 0
        while suspicion.is_grave:
            suspicion.gain_token()
            num_tokens += 1
        found.append(num_tokens)
    assert found == [0, 1, CLEARING_TOKENS, 0]


@pytest.mark.parametrize("num_workers", [3, 8])
@pytest.mark.parametrize("tokens_before", [0, 1, CLEARING_TOKENS - 1])
def test_a_fleet_loses_few_workers_to_a_poison_and_no_innocent(num_workers: int, tokens_before: int) -> None:
    """It kills every worker with the token after so many that it gains there, among thirty others, two steps ahead."""
    rng, waiting = Random(tokens_before), WaitingQueue()
    poison = make_group("poison", 30, root=b"poison", max_tokens=300)
    innocents = [make_group(str(i), rng.randrange(1, 60), root=bytes([i]), max_tokens=20) for i in range(30)]
    for group in (*innocents[:15], poison, *innocents[15:]):
        waiting.append(group)

    def start() -> tuple[Scheduler, FakeWorker, list[tuple[SchedulerOutput, ModelOutput | None]]]:
        scheduler = make_scheduler(waiting, num_device_blocks=300, max_num_seqs=16, max_model_len=400)
        return scheduler, FakeWorker(scheduler.config), []

    fleet = [start() for _ in range(num_workers)]
    gained_before, num_losses = 0, 0
    ended: list[SequenceGroup] = []
    for tick in range(4_000):
        number = rng.randrange(num_workers)
        scheduler, worker, in_flight = fleet[number]
        output = scheduler.schedule(tick / 100) if len(in_flight) < 2 else SchedulerOutput(0)
        if poison in [new.sequence.group for new in output.new_sequences]:
            gained_before = poison.sequences[0].num_output_tokens
        if not output.is_empty:
            gained = [s.num_computed_tokens - s.num_prompt_tokens for s, *_ in output.scheduled if s.group is poison]
            kills = any(answer is None for _, answer in in_flight) or max(gained, default=-1) >= (
                gained_before + tokens_before
            )
            in_flight.append((output, None if kills else worker.execute(output)))
        elif in_flight and in_flight[0][1] is None:
            num_losses += 1
            ended += scheduler.release_all()
            fleet[number] = start()
        elif in_flight:
            scheduler.update_from_output(*in_flight.pop(0), tick / 100)  # type: ignore[arg-type]
    assert ended == [poison]
    assert num_losses == (5 if tokens_before else 4)
    for group in innocents:
        assert output_of(group) == reference_output(group, 0, 400)


def test_a_poison_that_joins_while_an_answer_is_on_its_way_is_found_too() -> None:
    """The worker dies in the second step in flight, before its answer to the first has left it."""
    waiting = WaitingQueue()
    innocent, poison = make_group("innocent", 6, max_tokens=5), make_group("poison", 6, max_tokens=5)
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
    """Swapped out, it would be resumed in a step with those who run."""
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


def test_a_suspect_that_there_is_no_room_for_holds_nobody_up() -> None:
    """Those who run go on ahead of the answers, as long as it could not take their place."""
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
def test_a_flaky_worker_ends_nobody_while_a_sound_one_is_there(num_device_blocks: int) -> None:
    """It answers one step and is lost in the next, again and again, and has room whenever the sound one has none.

    In the smaller pool the sound one has swapped groups most of the time, and takes nobody then.
    """
    waiting = WaitingQueue()

    def start(worker: str) -> tuple[Scheduler, FakeWorker]:
        scheduler = make_scheduler(
            waiting,
            worker,
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
        bad, bad_worker = start("bad")
        output = bad.schedule(tick / 10)
        if not output.is_empty:
            bad.update_from_output(output, bad_worker.execute(output), tick / 10)
            bad.schedule(tick / 10)
        num_losses += bool(bad.steps_in_flight)
        assert bad.release_all() == []
        for _ in range(5):
            step(good, good_worker)
    assert num_losses > 3
    assert (good.num_preemptions[PreemptionMode.SWAP] > 0) is (num_device_blocks < 400)
    for group in groups:
        assert output_of(group) == reference_output(group, 0, 400)


def test_a_suspect_waits_for_a_worker_that_was_not_lost_with_it_and_holds_nobody_up_meanwhile() -> None:
    waiting = WaitingQueue()
    tried, untried = make_scheduler(waiting, "tried"), make_scheduler(waiting, "untried", max_num_seqs=1)
    tried.set_admission(False)
    long, suspected = make_group("long", 6, max_tokens=40), suspect(make_group("suspect", 6, root=b"s"), 2, "tried")
    waiting.append(long)
    worker = FakeWorker(untried.config)
    step(untried, worker)
    tried.set_admission(True)
    waiting.append(suspected)
    for number in range(2 * MAX_OVERTAKES):  # more than may overtake anybody else
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
    suspected = make_group("suspect", 6)
    waiting.append(suspected)
    for num_losses in (1, 2, 3):
        scheduler = make_scheduler(waiting, "only")
        assert plan(scheduler.schedule()) == {"suspect": [6]}
        assert scheduler.release_all() == ([suspected] if num_losses == 3 else [])


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
