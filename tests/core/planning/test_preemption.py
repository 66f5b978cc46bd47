"""Which groups make room, how, and how they come back."""

from collections import Counter
from dataclasses import replace

import pytest
from fake_worker import FakeWorker, reference_output
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run, step

from scheduler_service.core import (
    PhaseRule,
    PreemptionMode,
    PriorityQueue,
    Scheduler,
    SchedulerOutput,
    SequenceGroup,
    SequenceStatus,
    WaitingQueue,
)


def test_a_step_that_does_nothing_but_swap_in_is_sent() -> None:
    """With three steps in flight the last token of a group that comes back may have been computed before it left."""
    assert not SchedulerOutput(1, blocks_to_swap_in=[(0, 0)]).is_empty
    assert SchedulerOutput(1).is_empty


def test_when_blocks_run_out_the_last_admitted_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_device_blocks=4)
    worker = FakeWorker(scheduler.config)
    older, younger = (make_group(name, 8, root=name.encode(), max_tokens=5) for name in ("older", "younger"))
    for group in (older, younger, make_group("next", 4, root=b"next")):
        scheduler.add_request(group)
    step(scheduler, worker)
    younger_id = younger.sequences[0].id
    output = step(scheduler, worker)
    assert list(plan(output)) == ["older"]
    assert output.preempted == [younger_id]
    assert scheduler.waiting.head is younger
    assert younger.sequences[0].num_computed_tokens == 0
    run(scheduler, worker)
    for group in (older, younger):
        assert output_of(group) == reference_output(group, 0, scheduler.config.max_sequence_tokens)


def test_a_swapped_group_comes_back_with_its_blocks_and_computes_nothing_anew() -> None:
    scheduler = make_scheduler(num_device_blocks=7, num_host_blocks=7, preemption_mode=PreemptionMode.SWAP)
    worker = FakeWorker(scheduler.config)
    groups = [make_group(name, 7, root=name.encode(), n=2, max_tokens=9) for name in ("older", "younger")]
    for group in groups:
        scheduler.add_request(group)
    computed: Counter[str] = Counter()
    while scheduler.has_work:
        for name, chunks in plan(step(scheduler, worker)).items():
            computed[name] += sum(chunks)
    assert scheduler.num_preemptions[PreemptionMode.SWAP] > 0
    assert scheduler.num_preemptions[PreemptionMode.RECOMPUTE] == 0
    # The prompt once, the last prompt token again by the follower, and every output token but the last of each.
    assert computed == {"older": 7 + 1 + 2 * 8, "younger": 7 + 1 + 2 * 8}
    for group in groups:
        for index in range(2):
            assert output_of(group, index) == reference_output(group, index, 24)


def swapping_scheduler(**sizes: object) -> tuple[Scheduler, FakeWorker, SequenceGroup]:
    """Two groups of two, with no prefix in common, of which the younger has just been swapped out."""
    defaults: dict[str, object] = {"num_device_blocks": 7, "num_host_blocks": 7, "preemption_mode": PreemptionMode.SWAP}
    scheduler = make_scheduler(**(defaults | sizes))
    worker = FakeWorker(scheduler.config)
    for name in ("older", "younger"):
        scheduler.add_request(make_group(name, 7, root=name.encode(), n=2, max_tokens=9))
    while not sum(scheduler.num_preemptions.values()):
        step(scheduler, worker)
    return scheduler, worker, next(iter(scheduler.swapped or scheduler.waiting))


@pytest.mark.parametrize("mode", PreemptionMode)
def test_groups_that_take_turns_for_the_pool_do_not_preempt_each_other_for_ever(mode: PreemptionMode) -> None:
    """Each alone fits; any two outgrow the pool. Every preemption must be paid for by tokens."""
    scheduler = make_scheduler(num_device_blocks=8, num_host_blocks=32, preemption_mode=mode)
    groups = [make_group(str(i), 10, root=bytes(i), max_tokens=22) for i in range(6)]
    for group in groups:
        scheduler.add_request(group)
    run(scheduler, FakeWorker(scheduler.config), most_steps=6 * 22 + 20)
    assert sum(scheduler.num_preemptions.values()) <= 20


def test_aborting_a_swapped_group_frees_its_host_blocks() -> None:
    scheduler, _, younger = swapping_scheduler()
    assert scheduler.get_request_counts() == (1, 0, 1)
    assert scheduler.blocks.host.num_free < 7
    assert scheduler.finish_requests(["younger"], SequenceStatus.FINISHED_ABORTED) == [younger]
    assert scheduler.blocks.host.num_free == 7
    assert set(scheduler.schedule().finished) == {sequence.id for sequence in younger.sequences}
    assert scheduler.get_request_counts() == (1, 0, 0)


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_without_room_in_host_memory_a_victim_recomputes_and_nothing_dies(num_host_blocks: int) -> None:
    scheduler, worker, _ = swapping_scheduler(num_host_blocks=num_host_blocks)
    assert scheduler.num_preemptions == {PreemptionMode.SWAP: 0, PreemptionMode.RECOMPUTE: 1}
    run(scheduler, worker)


def test_a_lost_worker_gives_swapped_groups_back_too() -> None:
    scheduler, _, younger = swapping_scheduler()
    scheduler.release_all()
    assert [group.request_id for group in scheduler.waiting] == ["older", "younger"]
    assert {sequence.status for sequence in younger.sequences} == {SequenceStatus.WAITING}
    assert scheduler.blocks.host.num_free == 7


def test_no_equal_is_admitted_while_a_group_is_swapped_out() -> None:
    scheduler, worker, younger = swapping_scheduler()
    scheduler.add_request(make_group("newcomer", 1, max_tokens=1))
    while True:
        admitted = "newcomer" in plan(step(scheduler, worker))
        if younger not in scheduler.swapped:
            break
        assert not admitted
    run(scheduler, worker)


def test_with_separate_phases_a_prompt_that_was_swapped_out_goes_on_in_a_step_of_prompts() -> None:
    """It comes back while another group decodes; the two must not share a step."""
    scheduler = make_scheduler(
        PriorityQueue(),
        num_device_blocks=8,
        num_host_blocks=8,
        max_num_batched_tokens=8,
        phase_rule=PhaseRule.SEPARATE,
        preemption_mode=PreemptionMode.SWAP,
    )
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("short", 8, priority=1, max_tokens=3, root=b"short"))
    scheduler.add_request(make_group("long", 20, priority=2))
    assert [plan(step(scheduler, worker)) for _ in range(3)] == [{"short": [8]}, {"long": [8]}, {"long": [8]}]
    scheduler.add_request(make_group("urgent", 8, max_tokens=16, root=b"urgent"))
    assert plan(step(scheduler, worker)) == {"urgent": [8]}
    assert len(scheduler.swapped) == 1
    for _ in range(2):
        assert plan(step(scheduler, worker)) == {"short": [1], "urgent": [1]}
    assert plan(step(scheduler, worker)) == {"long": [4]}
    run(scheduler, worker)


def test_with_separate_phases_an_output_waits_for_those_of_its_group_that_are_behind_it() -> None:
    """Two outputs come back from a lost worker: one has the prompt to compute, then the other its own tokens."""
    waiting = WaitingQueue()
    scheduler = make_scheduler(waiting)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("two", 6, n=2, max_tokens=20))
    for _ in range(8):
        step(scheduler, worker)
    scheduler.release_all()
    scheduler = make_scheduler(waiting, phase_rule=PhaseRule.SEPARATE)
    worker = FakeWorker(scheduler.config)
    first, second, third = (plan(step(scheduler, worker))["two"] for _ in range(3))
    assert len(first) == len(second) == 1
    assert second[0] > 1
    assert third == [1, 1]
    run(scheduler, worker)


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
@pytest.mark.parametrize("phase_rule", PhaseRule)
def test_an_urgent_group_does_not_wait_for_one_that_is_swapped_out(mode: PreemptionMode, phase_rule: PhaseRule) -> None:
    """While a long one runs there is no room for the swapped one, but there is for the urgent one."""
    scheduler = make_scheduler(
        PriorityQueue(), num_device_blocks=10, num_host_blocks=10, preemption_mode=mode, phase_rule=phase_rule
    )
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("long", 8, priority=0, root=b"long", max_tokens=30))
    scheduler.add_request(make_group("victim", 12, priority=1, max_tokens=20))
    while not scheduler.num_preemptions[mode]:
        step(scheduler, worker)
    scheduler.add_request(make_group("urgent", 1, priority=-1000, max_tokens=1))
    assert plan(step(scheduler, worker))["urgent"] == [1]
    assert scheduler.get_request_counts()[0] == 1
    run(scheduler, worker)


@pytest.mark.parametrize("phase_rule", PhaseRule)
def test_a_swapped_group_is_overtaken_no_more_often_than_a_waiting_one(phase_rule: PhaseRule) -> None:
    """A better one comes in every step; three of them go before it, as ageing allows, and then it comes back."""
    scheduler = make_scheduler(
        PriorityQueue(overtakes=3),
        num_device_blocks=6,
        num_host_blocks=40,
        preemption_mode=PreemptionMode.SWAP,
        phase_rule=phase_rule,
    )
    worker = FakeWorker(scheduler.config)
    patient = make_group("patient", 16, priority=1, max_tokens=3, root=b"patient")
    scheduler.add_request(patient)
    step(scheduler, worker)
    better = []
    while not patient.is_finished:
        assert len(better) < 100
        better.append(make_group(str(len(better)), 6, max_tokens=8, root=bytes([len(better)])))
        scheduler.add_request(better[-1])
        step(scheduler, worker)
        if patient in scheduler.swapped:
            assert sum(group.history.num_cached_tokens is not None for group in better) <= 3
    assert scheduler.num_preemptions[PreemptionMode.SWAP]
    assert not scheduler.num_preemptions[PreemptionMode.RECOMPUTE]
    assert output_of(patient) == reference_output(patient, 0, 24)
    run(scheduler, worker)


def test_a_swapped_group_that_can_never_come_back_is_ended_and_its_host_blocks_are_freed() -> None:
    """Two outputs that share six prompt tokens grow until one more token of each needs more than the pool."""
    scheduler, worker, younger = swapping_scheduler()
    for sequence in younger.live:
        sequence.output_token_ids.extend([1] * 20)
    run(scheduler, worker)
    assert {sequence.status for sequence in younger.sequences} == {SequenceStatus.FINISHED_IGNORED}
    assert younger.error is not None
    assert scheduler.blocks.host.num_free == 7


@pytest.mark.parametrize(("swap_speed", "mode"), [(10_000_000, PreemptionMode.SWAP), (1_000, PreemptionMode.RECOMPUTE)])
def test_auto_takes_whichever_is_cheaper(swap_speed: int, mode: PreemptionMode) -> None:
    scheduler, _, _ = swapping_scheduler(
        preemption_mode=PreemptionMode.AUTO,
        block_bytes=10_000,
        swap_bytes_per_second=swap_speed,
        prefill_tokens_per_second=1_000,
    )
    assert scheduler.num_preemptions[mode] == 1


def test_victims_tokens_return_to_the_budget() -> None:
    """What a victim had been planned for goes to the groups that are planned after it, token for token.

    Two groups of two come back from a lost worker with 12 output tokens each, and a single one joins them. In the
    second step the single one is planned first (1 token), then the first group (1 + 12); the second group needs
    blocks, takes the single one's place, and of the budget of 26 tokens finds 13, not 12.
    """
    waiting = WaitingQueue()
    scheduler = make_scheduler(waiting, num_device_blocks=64)
    worker = FakeWorker(scheduler.config)
    groups = [make_group(name, 4, root=name.encode(), n=2, max_tokens=20) for name in "ab"]
    for group in groups:
        scheduler.add_request(group)
    while min(len(sequence.token_ids) for group in groups for sequence in group.sequences) < 16:
        step(scheduler, worker)
    for sequence in (sequence for group in groups for sequence in group.sequences):
        del sequence.output_token_ids[12:]
    scheduler.release_all()
    scheduler.add_request(make_group("single", 4))

    scheduler = make_scheduler(waiting, num_device_blocks=17, max_num_batched_tokens=40)
    worker = FakeWorker(scheduler.config)
    assert plan(step(scheduler, worker)) == {"a": [16], "b": [16], "single": [4]}
    scheduler.config = replace(scheduler.config, max_num_batched_tokens=26)
    assert plan(step(scheduler, worker)) == {"a": [1, 12], "b": [1, 12]}
    assert [group.request_id for group in waiting] == ["single"]
