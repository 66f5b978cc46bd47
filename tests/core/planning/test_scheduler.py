"""Which sequences are scheduled for how many tokens, and how requests end."""

from collections.abc import Callable

import pytest
from fake_worker import FakeWorker
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run, step, suspect

from scheduler_service.core import (
    FairQueue,
    ModelOutput,
    PhaseRule,
    PreemptionMode,
    PriorityQueue,
    SequenceStatus,
    WaitingQueue,
)


def test_a_long_prompt_is_computed_in_chunks_and_samples_only_after_the_last() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(make_group("a", 20))
    worker = FakeWorker(scheduler.config)
    outputs = [step(scheduler, worker) for _ in range(4)]
    assert [plan(output) for output in outputs] == [{"a": [8]}, {"a": [8]}, {"a": [4]}, {"a": [1]}]
    assert [output.scheduled[0].samples for output in outputs] == [False, False, True, True]


def test_decodes_and_prefill_chunks_share_a_step_and_decodes_go_first() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("long", 12))
    step(scheduler, worker)
    scheduler.add_request(make_group("short", 2))
    assert plan(step(scheduler, worker)) == {"long": [4], "short": [2]}
    scheduler.add_request(make_group("longer", 30))
    assert plan(step(scheduler, worker)) == {"long": [1], "short": [1], "longer": [6]}


@pytest.mark.parametrize("phase_rule", PhaseRule)
def test_a_long_prompt_does_not_hold_up_the_first_tokens_of_those_behind_it(phase_rule: PhaseRule) -> None:
    """It takes the 8 tokens that it may at first, and what is left when all had their turn."""
    scheduler = make_scheduler(
        max_num_batched_tokens=32, max_prefill_chunk=8, num_device_blocks=64, phase_rule=phase_rule
    )
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("long", 60, max_tokens=1))
    assert plan(step(scheduler, worker)) == {"long": [32]}
    for name in ("one", "two"):
        scheduler.add_request(make_group(name, 7, root=name.encode(), max_tokens=1))
    assert plan(step(scheduler, worker)) == {"long": [18], "one": [7], "two": [7]}
    assert plan(step(scheduler, worker)) == {"long": [10]}


def test_long_prompts_together_leave_room_in_the_step_for_short_ones() -> None:
    """Each takes half as many tokens as the one before it; what is left goes to the first."""
    scheduler = make_scheduler(max_num_batched_tokens=32, max_prefill_chunk=8, num_device_blocks=128)
    worker = FakeWorker(scheduler.config)
    for i in range(6):
        scheduler.add_request(make_group(f"long {i}", 60, root=bytes([i])))
    longs = {"long 0": [16], "long 1": [4], "long 2": [2], "long 3": [1], "long 4": [1], "long 5": [1]}
    scheduler.add_request(make_group("short", 7, root=b"short"))
    assert plan(step(scheduler, worker)) == longs | {"short": [7]}
    run(scheduler, worker)


def test_a_suspect_that_is_alone_takes_the_whole_step() -> None:
    waiting = WaitingQueue()
    waiting.append(make_group("suspect", 60))
    suspect(waiting.head)
    scheduler = make_scheduler(waiting, max_num_batched_tokens=32, max_prefill_chunk=8)
    worker = FakeWorker(scheduler.config)
    assert plan(step(scheduler, worker)) == {"suspect": [32]}
    assert plan(step(scheduler, worker)) == {"suspect": [28]}


def test_separate_phases_never_mix_prompts_and_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, phase_rule=PhaseRule.SEPARATE)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("first", 6, root=b"1"))
    assert plan(step(scheduler, worker)) == {"first": [6]}
    scheduler.add_request(make_group("second", 12, root=b"2"))
    scheduler.add_request(make_group("third", 3, root=b"3"))
    assert plan(step(scheduler, worker)) == {"second": [8]}
    assert plan(step(scheduler, worker)) == {"second": [4], "third": [3]}
    assert plan(step(scheduler, worker)) == {"first": [1], "second": [1], "third": [1]}
    run(scheduler, worker)


def test_a_delay_factor_lets_prompts_batch_up() -> None:
    """The prompt step took 1 s; with a factor of 3 the next prompt waits until the head has waited 3 s."""
    scheduler = make_scheduler(phase_rule=PhaseRule.SEPARATE, delay_factor=3.0)
    worker = FakeWorker(scheduler.config)

    def step_at(now: float) -> list[str]:
        output = scheduler.schedule(now)
        scheduler.update_from_output(output, worker.execute(output), now + 1)
        return list(plan(output))

    for name, arrived_at in (("first", 0.0), ("second", 1.0), ("third", 3.0)):
        group = make_group(name, 4, root=name.encode(), max_tokens=9)
        group.arrived_at = arrived_at
        if name == "first":
            scheduler.add_request(group)
            assert step_at(0.0) == ["first"]
        else:
            scheduler.add_request(group)
    assert [step_at(now) for now in (1.0, 2.0, 3.0)] == [["first"]] * 3
    assert step_at(4.0) == ["second", "third"]
    assert step_at(5.0) == ["first", "second", "third"]


@pytest.mark.parametrize(("policy", "next_one"), [(PriorityQueue, "urgent"), (FairQueue, "of the first tenant")])
def test_a_delay_ends_when_the_earliest_arrival_has_waited_for_long_enough_whichever_is_next(
    policy: Callable[[], WaitingQueue], next_one: str
) -> None:
    """The prompt step took 1 s; when the first to come has waited 3 s, one that came just now goes before it."""
    queue = policy()
    scheduler = make_scheduler(queue, phase_rule=PhaseRule.SEPARATE, delay_factor=3.0, max_num_batched_tokens=8)
    worker = FakeWorker(scheduler.config)

    def step_at(now: float) -> list[str]:
        output = scheduler.schedule(now)
        scheduler.update_from_output(output, worker.execute(output), now + 1)
        return list(plan(output))

    def arrive(name: str, at: float, priority: int, tenant: str) -> None:
        group = make_group(name, 4, root=name.encode(), priority=priority, tenant=tenant, max_tokens=9)
        group.arrived_at = at
        scheduler.add_request(group)

    arrive("running", 0.0, 0, "z")
    assert step_at(0.0) == ["running"]
    arrive("waiting", 1.0, 0, "b")
    assert [step_at(now) for now in (1.0, 2.0)] == [["running"]] * 2
    arrive(next_one, 3.5, -1, "a")
    assert queue.head.request_id == next_one
    assert step_at(3.9) == ["running"]
    assert step_at(4.0) == [next_one, "waiting"]


def test_requests_start_in_the_order_of_arrival_and_the_head_is_never_overtaken() -> None:
    scheduler = make_scheduler(num_device_blocks=4)
    worker = FakeWorker(scheduler.config)
    for name, num_tokens in (("first", 12), ("second", 12), ("third", 2)):
        scheduler.add_request(make_group(name, num_tokens, root=name.encode(), max_tokens=2))
    assert list(plan(step(scheduler, worker))) == ["first"]
    assert [group.request_id for group in scheduler.waiting] == ["second", "third"]


def test_sequences_are_counted_not_groups() -> None:
    scheduler = make_scheduler(max_num_seqs=4)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("three", 2, n=3))
    scheduler.add_request(make_group("two", 2, n=2))
    step(scheduler, worker)
    assert scheduler.get_request_counts() == (1, 1, 0)
    run(scheduler, worker)


@pytest.mark.parametrize("policy", [WaitingQueue, FairQueue])
def test_a_blocked_head_is_overtaken_by_no_group(policy: Callable[[], WaitingQueue]) -> None:
    scheduler = make_scheduler(policy(), num_device_blocks=8)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("running", 16, root=b"1", max_tokens=9))
    step(scheduler, worker)
    scheduler.add_request(make_group("large", 24, root=b"2"))
    for i in range(70):
        scheduler.add_request(make_group(f"small {i}", 2, root=b"3"))
    while "large" not in plan(output := step(scheduler, worker)):
        assert list(plan(output)) == ["running"]
    run(scheduler, worker)


@pytest.mark.parametrize(
    ("sampling", "status", "num_tokens", "stop"),
    [
        ({"max_tokens": 3}, SequenceStatus.FINISHED_LENGTH_CAPPED, 3, None),
        ({"max_tokens": 99}, SequenceStatus.FINISHED_LENGTH_CAPPED, 60, None),
        ({"max_tokens": 9, "eos_token_ids": frozenset(range(50))}, SequenceStatus.FINISHED_STOPPED, 1, None),
        ({"max_tokens": 9, "stop_token_ids": frozenset(range(50))}, SequenceStatus.FINISHED_STOPPED, 1, "token"),
        (
            {"max_tokens": 9, "min_tokens": 3, "eos_token_ids": frozenset(range(50))},
            SequenceStatus.FINISHED_STOPPED,
            4,
            None,
        ),
    ],
)
def test_sequences_end_for_the_stated_reason(
    sampling: dict[str, object], status: SequenceStatus, num_tokens: int, stop: str | None
) -> None:
    scheduler = make_scheduler()
    group = make_group("a", 4, **sampling)
    scheduler.add_request(group)
    run(scheduler, FakeWorker(scheduler.config))
    sequence = group.sequences[0]
    assert (sequence.status, sequence.num_output_tokens) == (status, num_tokens)
    assert sequence.stop_token_id == (sequence.token_ids[-1] if stop else None)


def test_a_pool_of_one_block_and_no_host_memory_serves_what_fits_in_it_one_after_the_other() -> None:
    scheduler = make_scheduler(num_device_blocks=1, preemption_mode=PreemptionMode.SWAP)
    groups = [make_group("a", 1, max_tokens=9), make_group("b", 3, n=2), make_group("c", 4), make_group("d", 5)]
    for group in groups:
        scheduler.add_request(group)
    run(scheduler, FakeWorker(scheduler.config))
    assert [len(output_of(group)) for group in groups] == [3, 0, 1, 0]
    ignored = SequenceStatus.FINISHED_IGNORED
    assert [group.sequences[0].status is ignored for group in groups] == [False, True, False, True]
    assert scheduler.blocks.device.num_free == 1


def test_a_prompt_of_exactly_the_pool_runs() -> None:
    scheduler = make_scheduler(num_device_blocks=4, watermark=0.5)
    group = make_group("a", 15)
    scheduler.add_request(group)
    run(scheduler, FakeWorker(scheduler.config))
    assert group.sequences[0].num_output_tokens == 1


@pytest.mark.parametrize(("num_tokens", "n"), [(99, 1), (4, 9)])
def test_a_group_that_can_never_run_is_ignored_with_a_reason_and_the_next_one_runs(num_tokens: int, n: int) -> None:
    scheduler = make_scheduler()
    group, neighbour = make_group("big", num_tokens, n=n), make_group("small", 4)
    scheduler.add_request(group)
    scheduler.add_request(neighbour)
    output = step(scheduler, FakeWorker(scheduler.config))
    assert output.ignored == [group]
    assert group.error is not None
    assert "16 blocks of 4 tokens and 8 sequences" in group.error
    assert {sequence.status for sequence in group.sequences} == {SequenceStatus.FINISHED_IGNORED}
    assert plan(output) == {"small": [4]}


def test_no_group_makes_room_for_one_that_can_never_run() -> None:
    """Its outputs need more than the pool; all places are taken, so that it is not known before looking."""
    scheduler = make_scheduler(PriorityQueue(), max_num_seqs=2, num_device_blocks=4)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("running", 4, priority=5, n=2, max_tokens=5))
    step(scheduler, worker)
    impossible = make_group("impossible", 17, priority=0)
    scheduler.add_request(impossible)
    output = step(scheduler, worker)
    assert output.ignored == [impossible]
    assert list(plan(output)) == ["running"]
    assert not sum(scheduler.num_preemptions.values())


@pytest.mark.parametrize("request_ids", ["running", b"running"])
def test_a_single_id_in_place_of_a_list_is_refused(request_ids: object) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_group("running", 6))
    with pytest.raises(TypeError, match=r"running'; it must be a list of ids"):
        scheduler.finish_requests(request_ids, SequenceStatus.FINISHED_ABORTED)  # type: ignore[arg-type]
    assert scheduler.finish_requests(("running",), SequenceStatus.FINISHED_ABORTED)


@pytest.mark.parametrize("policy", [WaitingQueue, PriorityQueue, FairQueue])
def test_an_id_is_refused_while_a_request_of_it_is_live_on_any_worker(policy: type[WaitingQueue]) -> None:
    """It waits, runs, is swapped out, runs again, comes back from a lost worker and is aborted; then its id is free."""
    waiting = policy()
    sizes = {"num_device_blocks": 7, "num_host_blocks": 7, "preemption_mode": PreemptionMode.SWAP}
    scheduler, other = make_scheduler(waiting, **sizes), make_scheduler(waiting)
    other.set_admission(False)
    worker = FakeWorker(scheduler.config)

    def see_it_refused() -> None:
        num_waiting = len(waiting)
        for each in (scheduler, other):
            with pytest.raises(ValueError, match="'younger', and a request with this id waits, runs or is swapped out"):
                each.add_request(make_group("younger", 1))
        assert len(waiting) == num_waiting

    older, younger = (make_group(name, 7, n=2, max_tokens=9) for name in ("older", "younger"))
    scheduler.add_request(older)
    scheduler.add_request(younger)
    see_it_refused()
    step(scheduler, worker)
    assert younger in scheduler.running
    see_it_refused()
    while younger not in scheduler.swapped:
        step(scheduler, worker)
    see_it_refused()
    while younger in scheduler.swapped:
        step(scheduler, worker)
    see_it_refused()
    scheduler.release_all()
    see_it_refused()
    other.finish_requests(["younger"], SequenceStatus.FINISHED_ABORTED)
    other.add_request(make_group("younger", 1))
    other.set_admission(True)
    run(other, FakeWorker(other.config))
    other.add_request(make_group("older", 1))  # both have ended by themselves
    other.add_request(make_group("younger", 1))


def test_requests_are_counted_where_they_are() -> None:
    """Requests, not sequences; those that wait once for all workers; those that have ended nowhere."""
    waiting = WaitingQueue()
    first, second = make_scheduler(waiting, max_num_seqs=3), make_scheduler(waiting, max_num_seqs=3)
    for name in "abc":
        first.add_request(make_group(name, 6, n=2, root=name.encode()))
    assert first.get_request_counts() == second.get_request_counts() == (0, 3, 0)
    first.schedule()
    second.schedule()
    assert first.get_request_counts() == second.get_request_counts() == (1, 1, 0)
    first.finish_requests(["a"], SequenceStatus.FINISHED_ABORTED)
    assert first.get_request_counts() == (0, 1, 0)
    second.release_all()
    assert first.get_request_counts() == (0, 2, 0)


def test_abort_frees_every_block_at_once_wherever_the_request_is() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    worker = FakeWorker(scheduler.config)
    for name, n in (("running", 3), ("waiting", 1)):
        scheduler.add_request(make_group(name, 6, n=n, max_tokens=12))
    output = scheduler.schedule()
    answer = worker.execute(output)
    ended = scheduler.finish_requests(["running", "waiting", "unknown"], SequenceStatus.FINISHED_ABORTED)
    assert [group.request_id for group in ended] == ["running", "waiting"]
    assert scheduler.blocks.device.num_free == 16
    assert scheduler.update_from_output(output, answer) == []
    assert scheduler.finish_requests(["running"], SequenceStatus.FINISHED_ABORTED) == []  # a doubled abort
    last = scheduler.schedule()
    assert last.finished == [output.scheduled[0].sequence.id]
    assert not scheduler.has_work


def test_a_sequence_whose_logits_are_not_finite_ends_alone() -> None:
    scheduler = make_scheduler()
    sick, well = make_group("sick", 4), make_group("well", 4)
    scheduler.add_request(sick)
    scheduler.add_request(well)
    output = scheduler.schedule()
    failed = frozenset({sick.sequences[0].id})
    scheduler.update_from_output(output, ModelOutput(1, [0, 7], failed_sequence_ids=failed))
    assert sick.sequences[0].status is SequenceStatus.FINISHED_FAILED
    assert output_of(sick) == []
    assert output_of(well) == [7]


def test_a_sequence_whose_own_parameters_allow_no_token_ends_alone_too() -> None:
    scheduler = make_scheduler()
    group = make_group("a", 4, n=2, max_tokens=2)
    scheduler.add_request(group)
    scheduler.update_from_output(scheduler.schedule(), ModelOutput(1, [7]))
    output = scheduler.schedule()
    barred = frozenset({group.sequences[0].id})
    scheduler.update_from_output(output, ModelOutput(2, [0, 8], failed_sequence_ids=barred, barred_sequence_ids=barred))
    assert group.sequences[0].status is SequenceStatus.FINISHED_BARRED
    scheduler.update_from_output(scheduler.schedule(), ModelOutput(3, [9]))
    assert group.sequences[1].status is SequenceStatus.FINISHED_LENGTH_CAPPED
    assert [list(sequence.output_token_ids) for sequence in group.sequences] == [[7], [8, 9]]
    scheduler.blocks.check()


@pytest.mark.parametrize("answer", [ModelOutput(2, [1]), ModelOutput(1, []), ModelOutput(1, [1, 2])])
def test_an_answer_that_does_not_fit_the_step_is_refused(answer: ModelOutput) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_group("a", 4))
    output = scheduler.schedule()
    with pytest.raises(ValueError, match="the worker"):
        scheduler.update_from_output(output, answer)
