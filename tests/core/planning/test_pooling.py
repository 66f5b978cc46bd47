"""Requests that are pooled end with their prompts; those of an encoder are computed whole and take no blocks."""

import pytest
from fake_worker import FakeWorker
from hypothesis import given
from hypothesis import strategies as st
from scheduler_helpers import make_group, make_scheduler, plan, run, step

from scheduler_service.core import (
    ModelOutput,
    PoolingParams,
    PoolingType,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceGroup,
    SequenceStatus,
)


def pooled(name: str, num_tokens: int, kind: PoolingType = PoolingType.LAST, **about: object) -> SequenceGroup:
    return make_group(name, num_tokens, max_tokens=1, pooling=PoolingParams(type=kind, dimensions=2), **about)  # type: ignore[arg-type]


def make_encoder(**sizes: object) -> Scheduler:
    return make_scheduler(**{"num_device_blocks": 0, "max_num_batched_tokens": 64, "max_model_len": 20} | sizes)


def answer(scheduler: Scheduler, output: SchedulerOutput) -> list[SequenceGroup]:
    """Every chunk that samples gains a vector; returns the groups that ended."""
    ids = [item.sequence.id for item in output.scheduled if item.samples]
    vectors = dict.fromkeys(ids, b"\0" * 8)
    gained = scheduler.update_from_output(
        output, ModelOutput(output.step_id, [0] * output.num_samples, vectors=vectors)
    )
    assert all(item.token_id is None and item.vectors for item in gained if item.sequence.id in vectors)
    assert all(item.sequence.status is SequenceStatus.FINISHED_LENGTH_CAPPED for item in gained)
    return [item.sequence.group for item in gained]


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=30),
    st.integers(20, 50),  # tokens of a step
    st.integers(1, 8),  # sequences of a step
    st.integers(1, 3),  # steps in flight
)
def test_texts_of_an_encoder_are_computed_whole_in_their_order_and_within_the_budgets(
    lengths: list[int], max_num_batched_tokens: int, max_num_seqs: int, most_in_flight: int
) -> None:
    scheduler = make_encoder(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
    groups = [pooled(str(number), length) for number, length in enumerate(lengths)]
    for group in groups:
        scheduler.add_request(group)
    ended: list[SequenceGroup] = []
    in_flight: list[SchedulerOutput] = []
    while len(ended) < len(groups):
        output = scheduler.schedule()
        if not output.is_empty and output.scheduled:
            assert output.num_tokens <= max_num_batched_tokens
            assert len(output.scheduled) <= max_num_seqs
            for sequence, num_tokens, samples in output.scheduled:
                assert samples
                assert num_tokens == sequence.num_prompt_tokens
            assert not any(new.block_ids for new in output.new_sequences)
            # Nothing that would have fitted is left for later.
            waiting = [group for group in groups if group.request_id in scheduler.waiting]
            has_place = scheduler.num_running_seqs < max_num_seqs
            if waiting and has_place:
                assert output.num_tokens + len(waiting[0].prompt_token_ids) > max_num_batched_tokens
        if not output.is_empty:
            in_flight.append(output)
        if len(in_flight) >= most_in_flight or not output.scheduled:
            ended += answer(scheduler, in_flight.pop(0))
        scheduler.blocks.check()
    assert ended == groups
    assert not scheduler.running


def test_a_text_that_outranks_others_waits_for_the_next_step_and_costs_them_nothing() -> None:
    from scheduler_service.core import PriorityQueue

    scheduler = make_encoder(waiting=PriorityQueue(), max_num_batched_tokens=20)
    scheduler.add_request(pooled("low", 15, priority=1))
    first = scheduler.schedule()
    scheduler.add_request(pooled("high", 20, priority=0))
    assert plan(scheduler.schedule()) == {"high": [20]}  # which has a step of its own
    assert [group.request_id for group in answer(scheduler, first)] == ["low"]
    assert not sum(scheduler.num_preemptions.values())


def test_an_encoder_needs_a_step_for_its_longest_text() -> None:
    sizes = {"block_size": 4, "num_device_blocks": 0, "max_num_seqs": 4, "max_model_len": 20}
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 19; .* an encoder computes a text whole"):
        SchedulerConfig(**sizes, max_num_batched_tokens=19)  # type: ignore[arg-type]
    assert SchedulerConfig(**sizes, max_num_batched_tokens=20).max_sequence_tokens == 20  # type: ignore[arg-type]


def test_the_prompt_may_be_as_long_as_the_context() -> None:
    """Nothing is sampled behind it."""
    scheduler = make_scheduler(num_device_blocks=16, max_model_len=64)
    scheduler.add_request(pooled("a", 64))
    (ended,) = answer(scheduler, scheduler.schedule())
    assert ended.is_finished
    assert scheduler.schedule().finished
    assert scheduler.blocks.device.num_free == 16


@pytest.mark.parametrize("kind", PoolingType)
def test_what_was_computed_before_is_found_where_the_last_state_is_enough(kind: PoolingType) -> None:
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("first", 17, max_tokens=1))
    run(scheduler, worker)
    scheduler.add_request(pooled("second", 17, kind))
    assert plan(scheduler.schedule()) == {"second": [1 if kind is PoolingType.LAST else 17]}


def test_what_is_pooled_is_computed_in_chunks_beside_decodes_and_found_by_others() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=9, max_prefill_chunk=8)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("stream", 4, root=b"other", max_tokens=20))
    step(scheduler, worker)
    scheduler.add_request(pooled("vector", 20, PoolingType.MEAN))
    assert [plan(step(scheduler, worker))["vector"] for _ in range(2)] == [[8], [8]]
    output = scheduler.schedule()
    assert plan(output) == {"stream": [1], "vector": [4]}
    ids = {item.sequence.group.request_id: item.sequence.id for item in output.scheduled}
    gained = scheduler.update_from_output(
        output, ModelOutput(output.step_id, [7, 0], vectors={ids["vector"]: b"\0" * 8})
    )
    assert [(item.sequence.group.request_id, item.token_id, item.vectors) for item in gained] == [
        ("stream", 7, b""),
        ("vector", None, b"\0" * 8),
    ]
    follower = make_group("follower", 20)
    assert scheduler.room_for(follower) == 16


def test_a_sequence_whose_vector_is_not_finite_ends_with_a_sentence() -> None:
    scheduler = make_encoder()
    group = pooled("a", 5)
    scheduler.add_request(group)
    output = scheduler.schedule()
    failed = frozenset({output.scheduled[0].sequence.id})
    scheduler.update_from_output(output, ModelOutput(output.step_id, [0], failed_sequence_ids=failed))
    assert group.sequences[0].status is SequenceStatus.FINISHED_FAILED
