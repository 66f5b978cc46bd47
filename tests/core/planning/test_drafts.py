"""Room for drafts, which a worker makes and verifies, and what is known of a sequence before it has answered."""

from collections import defaultdict
from dataclasses import replace
from random import Random

from fake_worker import FakeWorker, reference_output
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run, step

from scheduler_service.core import (
    ModelOutput,
    PhaseRule,
    PreemptionMode,
    Scheduler,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
)


@settings(deadline=None, max_examples=50)
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 4),
    st.integers(8, 20),
    st.sampled_from(PreemptionMode),
    st.integers(1, 4),
)
def test_drafts_change_nothing_but_the_number_of_steps(
    random: Random, num_lookahead_slots: int, num_blocks: int, mode: PreemptionMode, max_in_flight: int
) -> None:
    scheduler = make_scheduler(
        num_lookahead_slots=num_lookahead_slots,
        num_device_blocks=num_blocks,
        num_host_blocks=8,
        preemption_mode=mode,
        max_num_batched_tokens=12,
    )
    most = scheduler.config.max_sequence_tokens
    groups = [
        make_group(
            str(i),
            random.randint(1, 9),
            root=bytes(i),
            n=1 + i % 2,
            max_tokens=random.randint(1, 15),
            logprobs=[None, 2][i // 2],
        )
        for i in range(4)
    ]
    stopping = groups[2].sequences[0]  # some drafts go on, rightly, after a token that ends it
    stopping.sampling = replace(groups[2].sampling, stop_token_ids=frozenset(range(20)))
    stopping.end_token_ids = stopping.sampling.end_token_ids
    worker = FakeWorker(scheduler.config, drafting=random)
    for group in groups:
        scheduler.add_request(group)
    in_flight: list[tuple[SchedulerOutput, ModelOutput]] = []
    reported: dict[Sequence, list[int]] = defaultdict(list)
    for _ in range(2_000):
        if not scheduler.has_work and not in_flight:
            break
        output = scheduler.schedule()
        assert all(room <= num_lookahead_slots for room in output.num_draft_tokens.values())
        if not output.is_empty:
            in_flight.append((output, worker.execute(output)))
        if in_flight and (output.is_empty or len(in_flight) == max_in_flight):
            for item in scheduler.update_from_output(*in_flight.pop(0)):
                assert item.prompt_start == 0
                if item.logprobs is not None:
                    reported[item.sequence].append(item.logprobs.token_ids[0])
        scheduler.blocks.check()
    assert scheduler.blocks.device.num_free == num_blocks
    for group in groups:
        for sequence in group.sequences:
            expected = reference_output(group, sequence.index, most)
            if sequence.status is SequenceStatus.FINISHED_IGNORED:
                expected = expected[: sequence.num_output_tokens]
            elif sequence.sampling.stop_token_ids:
                ends = [i for i, token in enumerate(expected) if token < 20]
                expected = expected[: ends[0] + 1] if ends else expected
            assert output_of(group, sequence.index) == expected
            assert reported[sequence] == (expected if group.sampling.logprobs else [])


def answer(scheduler: Scheduler, worker: FakeWorker, output: SchedulerOutput, wanted: list[int] | None = None) -> None:
    """Take in what the worker makes of a step, which is right about everything that it has room to draft."""
    found = worker.execute(output)
    scheduler.update_from_output(output, replace(found, num_draft_tokens_wanted=wanted or []))


def test_right_drafts_save_steps() -> None:
    scheduler = make_scheduler(num_lookahead_slots=3)
    worker = FakeWorker(scheduler.config)
    group = make_group("a", 5, max_tokens=12)
    scheduler.add_request(group)
    expected = reference_output(group, 0, 61)
    answer(scheduler, worker, scheduler.schedule(), wanted=[3])
    for num_output_tokens in (1, 5):
        assert output_of(group) == expected[:num_output_tokens]
        assert plan(step(scheduler, worker)) == {"a": [4]}
    assert output_of(group) == expected[:9]
    run(scheduler, worker)
    assert output_of(group) == expected


def test_steps_with_room_for_drafts_are_planned_ahead_of_answers_and_room_stays_until_it_is_not_wanted() -> None:
    scheduler = make_scheduler(num_lookahead_slots=3, max_model_len=100, num_device_blocks=32)
    worker, group = FakeWorker(scheduler.config), make_group("a", 5, max_tokens=40)
    scheduler.add_request(group)
    answer(scheduler, worker, scheduler.schedule(), wanted=[99])  # as many as there are slots for
    ahead = [scheduler.schedule() for _ in range(3)]
    assert [plan(output) for output in ahead] == [{"a": [4]}] * 3
    for output in ahead[:2]:
        answer(scheduler, worker, output)
    assert len(output_of(group)) == 9
    answer(scheduler, worker, ahead[2], wanted=[0])
    while scheduler.running:
        output = scheduler.schedule()
        assert plan(output) == {"a": [1]}
        answer(scheduler, worker, output)
    assert output_of(group) == reference_output(group, 0, 100)


def test_no_step_goes_past_the_longest_output_however_right_drafts_are() -> None:
    """A step has room for half of what is left, so that another can be planned; where all that is left may be in
    flight, a sequence waits for the answer."""
    scheduler = make_scheduler(num_lookahead_slots=3)
    worker, group = FakeWorker(scheduler.config), make_group("a", 5, max_tokens=8)
    scheduler.add_request(group)
    answer(scheduler, worker, scheduler.schedule(), wanted=[3])
    ahead = [scheduler.schedule() for _ in range(3)]
    assert [plan(output) for output in ahead] == [{"a": [4]}, {"a": [2]}, {"a": [1]}]
    assert scheduler.schedule().is_empty
    worker.drafting = Random(1)
    worker.drafting.randint = lambda *_: 0  # type: ignore[method-assign]  # it drafts nothing
    worker.drafting.random = lambda: 1.0  # type: ignore[method-assign]
    for output in ahead:
        answer(scheduler, worker, output)
    assert len(output_of(group)) == 4
    run(scheduler, worker)
    assert output_of(group) == reference_output(group, 0, 61)


def test_lookahead_slots_have_blocks_before_they_are_needed() -> None:
    scheduler = make_scheduler(num_lookahead_slots=3)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("a", 5, max_tokens=8))
    for num_tokens in range(5, 12):
        step(scheduler, worker)
        (table,) = scheduler.blocks.tables.values()
        assert len(table) == -(-(num_tokens + 3) // 4)


def test_no_block_is_let_go_of_as_behind_the_window_for_drafts_that_may_be_rejected() -> None:
    scheduler = make_scheduler(block_size=1, num_lookahead_slots=3, sliding_window=2, num_device_blocks=40)
    worker = FakeWorker(scheduler.config)
    group = make_group("a", 5, max_tokens=14)
    scheduler.add_request(group)
    answer(scheduler, worker, scheduler.schedule(), wanted=[3])
    first = scheduler.schedule()
    assert plan(first) == {"a": [4]}
    scheduler.add_request(make_group("b", 5, root=b"b"))
    second = scheduler.schedule()
    assert plan(second) == {"a": [4], "b": [5]}
    worker.drafting = Random(1)
    worker.drafting.random = lambda: 1.0  # type: ignore[method-assign]  # it is always wrong
    for output in (first, second):
        answer(scheduler, worker, output)
    run(scheduler, worker)
    assert output_of(group) == reference_output(group, 0, 37)


def decoding(num_sequences: int, **sizes: int) -> tuple[Scheduler, FakeWorker]:
    """So many sequences that have computed their prompts, for each of which there should be room for 8 draft tokens."""
    scheduler = make_scheduler(num_lookahead_slots=8, num_device_blocks=200, **sizes)
    worker = FakeWorker(scheduler.config)
    for number in range(num_sequences):
        scheduler.add_request(make_group(str(number), 4, root=bytes([number]), max_tokens=50))
    while scheduler.waiting or any(group.is_behind for group in scheduler.running):
        output = scheduler.schedule()
        answer(scheduler, worker, output, wanted=[8] * output.num_samples)
    return scheduler, worker


def test_no_sequence_waits_for_the_drafts_of_others() -> None:
    """What is left of a step when all have their token is shared evenly; too little for all is for none."""
    scheduler, _ = decoding(6, max_num_batched_tokens=20)
    assert plan(scheduler.schedule()) == {str(number): [3] for number in range(6)}
    scheduler, _ = decoding(6, max_num_batched_tokens=11)
    assert plan(scheduler.schedule()) == {str(number): [1] for number in range(6)}


def test_no_prompt_waits_for_drafts() -> None:
    scheduler, _ = decoding(4, max_num_batched_tokens=20)
    scheduler.add_request(make_group("prompt", 14, root=b"p", max_tokens=5))
    assert plan(scheduler.schedule()) == {str(number): [1] for number in range(4)} | {"prompt": [14]}


def test_drafts_have_blocks_that_are_free_above_the_watermark_or_that_the_sequence_has() -> None:
    scheduler, worker = decoding(2, watermark=0.9)
    assert scheduler.blocks.device.num_free > scheduler.blocks.num_watermark_blocks
    before = {id_: len(table) for id_, table in scheduler.blocks.tables.items()}
    assert plan(scheduler.schedule()) == {"0": [9], "1": [9]}
    assert all(len(table) > before[id_] for id_, table in scheduler.blocks.tables.items())

    scheduler, worker = decoding(2, watermark=0.99)
    assert scheduler.blocks.device.num_free <= scheduler.blocks.num_watermark_blocks
    for _ in range(6):
        num_slots = {id_: 4 * len(table) for id_, table in scheduler.blocks.tables.items()}
        output = scheduler.schedule()
        for sequence in output.num_draft_tokens:
            assert sequence.num_computed_tokens + 8 <= max(
                num_slots[sequence.id], 4 * len(scheduler.blocks.tables[sequence.id])
            )
        answer(scheduler, worker, output)


def test_steps_with_room_for_drafts_are_like_the_one_before() -> None:
    """They are not planned anew, and a sequence that seemed to be at its end goes on."""
    scheduler, worker = decoding(3, max_num_batched_tokens=64)
    worker.drafting = Random(1)
    worker.drafting.random = lambda: 1.0  # type: ignore[method-assign]  # it is always wrong
    in_flight = [scheduler.schedule()]
    plans = []
    while in_flight:
        steady = scheduler._steady._plan is not None
        output = scheduler.schedule()
        if not output.is_empty:
            plans.append(steady)
            in_flight.append(output)
        first = in_flight.pop(0)
        answer(scheduler, worker, first)
    assert not scheduler.has_work
    assert sum(plans) > 0.9 * len(plans)


def test_with_separate_phases_drafts_wait_while_prompts_are_computed() -> None:
    scheduler = make_scheduler(
        num_lookahead_slots=3,
        phase_rule=PhaseRule.SEPARATE,
        max_model_len=60,
        num_device_blocks=64,
        max_num_batched_tokens=32,
    )
    worker, group = FakeWorker(scheduler.config), make_group("a", 5, root=b"a", max_tokens=30)
    (sequence,) = group.sequences
    scheduler.add_request(group)
    answer(scheduler, worker, scheduler.schedule(), wanted=[3])
    scheduler.add_request(make_group("b", 3, root=b"b", max_tokens=50))
    output = scheduler.schedule()
    assert sequence not in [scheduled.sequence for scheduled in output.scheduled]
    answer(scheduler, worker, output)
    output = scheduler.schedule()
    assert output.num_draft_tokens == {sequence: 3}
    answer(scheduler, worker, output)
    scheduler.add_request(make_group("c", 3, root=b"c", max_tokens=5, beam_width=2))
    run(scheduler, worker)
    assert output_of(group) == reference_output(group, 0, 60)
