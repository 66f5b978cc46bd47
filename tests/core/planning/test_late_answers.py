"""A worker that still reads what an output has written in its form samples no token for it, and does so later."""

from random import Random
from unittest import mock

import pytest
from fake_worker import FakeWorker, reference_output
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import make_group, make_image, make_scheduler, output_of, plan, run_ahead

from scheduler_service.core import (
    ModelOutput,
    PreemptionMode,
    SamplingParams,
    SchedulerOutput,
    SequenceGroup,
    SequenceStatus,
)
from scheduler_service.core.blocks import states
from scheduler_service.core.config import LayerGroup


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32).map(Random),
    st.integers(10, 20),
    st.sampled_from(PreemptionMode),
    st.integers(1, 4),
    st.sampled_from([0, 0, 6]),
    st.booleans(),
)
def test_late_answers_change_nothing_but_the_number_of_steps(
    random: Random, num_blocks: int, mode: PreemptionMode, max_in_flight: int, window: int, drafts: bool
) -> None:
    scheduler = make_scheduler(
        num_lookahead_slots=2 * drafts,
        num_device_blocks=num_blocks,
        num_host_blocks=8,
        preemption_mode=mode,
        max_num_batched_tokens=12,
        sliding_window=window,
        encoder_cache_size=random.randint(5, 9),
    )
    most = scheduler.config.max_sequence_tokens
    groups = [
        make_group(
            str(i),
            length := random.randint(1, 9),
            root=bytes(i),
            items=(make_image(str(length), length // 2, length - length // 2),) * random.randint(0, 1),
            n=1 + i % 2,
            max_tokens=random.randint(1, 15),
            form="a form" if i < 3 else "",
            logprobs=[None, 2][i // 2],
        )
        for i in range(4)
    ]
    worker = FakeWorker(scheduler.config, drafting=random if drafts else None, reading=random)
    for group in groups:
        scheduler.add_request(group)
    in_flight: list[tuple[SchedulerOutput, ModelOutput]] = []
    for _ in range(2_000):
        if not scheduler.has_work and not in_flight:
            break
        output = scheduler.schedule()
        if not output.is_empty:
            in_flight.append((output, worker.execute(output)))
        if in_flight and (output.is_empty or len(in_flight) == max_in_flight):
            scheduler.update_from_output(*in_flight.pop(0))
        scheduler.blocks.check()
        scheduler.encoder_cache.check()
    assert scheduler.blocks.device.num_free == num_blocks
    for group in groups:
        for sequence in group.sequences:
            expected = reference_output(group, sequence.index, most)
            if sequence.status is SequenceStatus.FINISHED_IGNORED:
                expected = expected[: sequence.num_output_tokens]
            assert output_of(group, sequence.index) == expected


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_others_gain_a_token_in_each_step_meanwhile(num_ahead: int) -> None:
    scheduler = make_scheduler()
    slow, other = make_group("slow", 3, form="a form"), make_group("other", 3, max_tokens=40)
    for group in (slow, other):
        scheduler.add_request(group)
    worker = FakeWorker(scheduler.config, reading=Random(1))
    steps = run_ahead(scheduler, worker, num_ahead)
    assert sum("other" in plan(output) for output in steps) <= 40 + num_ahead
    assert sum("slow" in plan(output) for output in steps) > 4
    assert not any("slow" in plan(output) for output in steps[20:]), "it waits until the others have ended"
    assert [output_of(group) for group in (slow, other)] == [reference_output(group, 0, 64) for group in (slow, other)]


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
@pytest.mark.parametrize("outputs", [([], [7, 8]), ([7], [7, 8]), ([7, 8], [])])
def test_an_output_that_has_begun_forks_from_one_that_is_late(num_ahead: int, outputs: tuple[list[int], ...]) -> None:
    """As in a stream that is resumed, or after a preemption: the worker has the leader's last token as not computed."""
    scheduler = make_scheduler()
    sampling = SamplingParams(n=2, max_tokens=9, form="a form")
    scheduler.add_request(group := SequenceGroup("resumed", range(6), sampling, output_token_ids=outputs))
    run_ahead(scheduler, FakeWorker(scheduler.config, reading=Random(1)), num_ahead)
    assert [sequence.num_output_tokens for sequence in group.sequences] == [9, 9]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32).map(Random), st.integers(14, 40), st.integers(1, 4), st.booleans())
def test_states_are_those_of_their_tokens_also_after_late_answers(
    random: Random, num_blocks: int, max_in_flight: int, has_keys: bool
) -> None:
    """Each output is the prompt of the next request, which continues from the states that were kept."""
    keys = [LayerGroup(4)] * has_keys
    scheduler = make_scheduler(num_device_blocks=num_blocks, layer_groups=(*keys, LayerGroup(0)), max_model_len=60)
    worker, tokens = FakeWorker(scheduler.config, reading=random), [*range(random.randint(1, 9))]
    with mock.patch.object(states, "OUTPUT_SPACING", 4):
        for number in range(4):
            sampling = SamplingParams(max_tokens=random.randint(1, 11), form="a form")
            group = SequenceGroup(str(number), tokens, sampling)
            expected = reference_output(group, 0, scheduler.config.max_sequence_tokens)
            scheduler.add_request(group)
            run_ahead(scheduler, worker, max_in_flight)
            assert output_of(group) == expected
            tokens = tokens + expected
