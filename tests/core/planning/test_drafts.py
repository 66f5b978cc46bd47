"""Guessed tokens, and the room that they need."""

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
    SchedulerOutput,
    Sequence,
    SequenceStatus,
)


@settings(deadline=None, max_examples=50)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(8, 20), st.sampled_from(PreemptionMode))
def test_guesses_are_verified_and_change_nothing_but_the_number_of_steps(
    random: Random, num_lookahead_slots: int, num_blocks: int, mode: PreemptionMode
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
    stopping = groups[2].sequences[0]  # some guesses go on, rightly, after a token that ends it
    stopping.sampling = replace(groups[2].sampling, stop_token_ids=frozenset(range(20)))
    stopping.end_token_ids = stopping.sampling.end_token_ids
    worker = FakeWorker(scheduler.config)
    for group in groups:
        scheduler.add_request(group)
    in_flight: list[tuple[SchedulerOutput, ModelOutput]] = []
    reported: dict[Sequence, list[int]] = defaultdict(list)
    for _ in range(2_000):
        if not scheduler.has_work and not in_flight:
            break
        drafts = {}
        for sequence in (sequence for group in groups for sequence in group.live if sequence.id):
            expected = reference_output(sequence.group, sequence.index, most)[sequence.num_output_tokens :]
            drafts[sequence.id] = [t if random.random() < 0.7 else random.randrange(50) for t in [*expected, 1, 2]]
        scheduler.update_draft_token_ids(drafts)
        output = scheduler.schedule()
        assert all(len(draft) <= num_lookahead_slots for draft in output.draft_tokens.values())
        if not output.is_empty:
            in_flight.append((output, worker.execute(output)))
        if in_flight and (output.is_empty or len(in_flight) == 2):
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


def test_right_guesses_save_steps() -> None:
    scheduler = make_scheduler(num_lookahead_slots=3)
    worker = FakeWorker(scheduler.config)
    group = make_group("a", 5, max_tokens=9)
    scheduler.add_request(group)
    expected = reference_output(group, 0, 61)
    step(scheduler, worker)
    for num_output_tokens in (1, 5):
        assert output_of(group) == expected[:num_output_tokens]
        scheduler.update_draft_token_ids({1: expected[num_output_tokens:], 99: [1]})
        assert plan(step(scheduler, worker)) == {"a": [4]}
    assert output_of(group) == expected
    assert not scheduler.running


def test_lookahead_slots_have_blocks_before_they_are_needed() -> None:
    scheduler = make_scheduler(num_lookahead_slots=3)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("a", 5, max_tokens=8))
    for num_tokens in range(5, 12):
        step(scheduler, worker)
        (table,) = scheduler.blocks.tables.values()
        assert len(table) == -(-(num_tokens + 3) // 4)


def test_no_block_is_let_go_of_as_behind_the_window_for_guesses_that_may_be_wrong() -> None:
    scheduler = make_scheduler(block_size=1, num_lookahead_slots=3, sliding_window=2)
    worker = FakeWorker(scheduler.config)
    group = make_group("a", 5, max_tokens=9)
    scheduler.add_request(group)
    step(scheduler, worker)
    expected = reference_output(group, 0, 13)
    scheduler.update_draft_token_ids({1: [(token + 1) % 50 for token in expected[1:4]]})
    first = scheduler.schedule()
    assert plan(first) == {"a": [4]}
    scheduler.add_request(make_group("b", 5, root=b"b"))
    second = scheduler.schedule()
    assert plan(second) == {"b": [5]}
    for output in (first, second):
        scheduler.update_from_output(output, worker.execute(output))
    run(scheduler, worker)
    assert output_of(group) == expected


def test_guesses_are_for_the_very_next_step_of_a_sequence_and_for_no_later_one() -> None:
    """A prompt that has a step to itself comes between, and then steps that are like the one before."""
    scheduler = make_scheduler(
        num_lookahead_slots=3,
        phase_rule=PhaseRule.SEPARATE,
        max_model_len=20,
        num_device_blocks=32,
        max_num_batched_tokens=32,
    )
    worker, group = FakeWorker(scheduler.config), make_group("a", 5, root=b"a", max_tokens=100)
    (sequence,) = group.sequences

    def compute(drafts: dict[int, list[int]] | None = None) -> SchedulerOutput:
        output = scheduler.schedule()
        assert sequence.num_computed_tokens <= scheduler.config.max_model_len
        scheduler.update_from_output(output, worker.execute(output))
        scheduler.update_draft_token_ids(drafts or {})
        return output

    scheduler.add_request(group)
    while sequence.num_tokens < 13:
        compute()
    compute({sequence.id: [1, 2, 3]})
    scheduler.add_request(make_group("b", 3, root=b"b", max_tokens=50))
    assert sequence not in [scheduled.sequence for scheduled in compute().scheduled]
    assert compute().draft_tokens == {sequence.id: [1, 2, 3]}
    while sequence.num_tokens < 18:
        assert not compute().draft_tokens
    scheduler.add_request(make_group("c", 3, root=b"c", max_tokens=5, beam_width=2))  # a plan like no step before
    while scheduler.has_work:
        assert not compute().draft_tokens
