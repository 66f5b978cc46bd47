"""Requests that come with a part of their output go on behind it, as if they had never been anywhere else."""

import pytest
from fake_worker import FakeWorker, reference_output
from scheduler_helpers import make_group, make_scheduler, output_of, run, run_ahead, step

from scheduler_service.core import SamplingParams, SequenceGroup, SequenceStatus


def resumed(whole: SequenceGroup, *lengths: int, ended: frozenset[int] = frozenset()) -> SequenceGroup:
    """The same request, of which each output has so many tokens already."""
    outputs = tuple(tuple(reference_output(whole, index, 64)[:length]) for index, length in enumerate(lengths))
    return SequenceGroup(
        "resumed", whole.prompt_token_ids, whole.sampling, output_token_ids=outputs, ended=ended, arrived_at=0.0
    )


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("length", range(7))
def test_an_output_goes_on_behind_its_tokens_wherever_it_broke(length: int, num_ahead: int) -> None:
    whole = make_group("whole", 9, max_tokens=7)
    scheduler = make_scheduler(max_num_batched_tokens=5, max_num_seqs=5)
    group = resumed(whole, length)
    scheduler.add_request(group)
    run_ahead(scheduler, FakeWorker(scheduler.config), num_ahead)
    assert output_of(group) == reference_output(whole, 0, 64)
    assert group.sequences[0].num_output_tokens == 7
    assert group.sequences[0].status is SequenceStatus.FINISHED_LENGTH_CAPPED
    assert scheduler.blocks.device.num_free == 16


@pytest.mark.parametrize("lengths", [(3, 0, 5), (0, 5, 1), (5, 5, 5), (0, 0, 4)])
def test_several_outputs_go_on_from_different_lengths(lengths: tuple[int, ...]) -> None:
    whole = make_group("whole", 6, n=3, max_tokens=6)
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler.config)
    group = resumed(whole, *lengths)
    scheduler.add_request(group)
    run(scheduler, worker)
    assert [output_of(group, index) for index in range(3)] == [reference_output(whole, i, 64) for i in range(3)]


@pytest.mark.parametrize("ended", [{0}, {1}, {0, 2}])
def test_outputs_that_had_ended_are_not_computed_again(ended: set[int]) -> None:
    whole = make_group("whole", 6, n=3, max_tokens=6)
    scheduler = make_scheduler()
    group = resumed(whole, *(0 if index in ended else 2 for index in range(3)), ended=frozenset(ended))
    scheduler.add_request(group)
    steps = run_ahead(scheduler, FakeWorker(scheduler.config), 0)
    assert {s.sequence.index for output in steps for s in output.scheduled} == {0, 1, 2} - ended
    for index in {0, 1, 2} - ended:
        assert output_of(group, index) == reference_output(whole, index, 64)
    assert scheduler.blocks.device.num_free == 16


def test_a_worker_that_is_lost_meanwhile_costs_nothing_but_time() -> None:
    whole = make_group("whole", 6, n=2, max_tokens=8)
    first = make_scheduler()
    group = resumed(whole, 3, 1)
    first.add_request(group)
    worker = FakeWorker(first.config)
    for _ in range(3):
        step(first, worker)
    assert first.release_all() == []
    second = make_scheduler(first.waiting)
    run(second, FakeWorker(second.config))
    assert [output_of(group, index) for index in range(2)] == [reference_output(whole, i, 64) for i in range(2)]


def test_min_tokens_count_those_that_came_before() -> None:
    whole = make_group("whole", 6, max_tokens=8)
    tokens = reference_output(whole, 0, 64)
    end = next(i for i in range(4, 8) if tokens[i] not in tokens[:i])
    sampling = SamplingParams(max_tokens=8, min_tokens=4, eos_token_ids=frozenset({tokens[end]}))
    group = SequenceGroup("resumed", range(6), sampling, output_token_ids=(tuple(tokens[:3]),))
    scheduler = make_scheduler()
    scheduler.add_request(group)
    run(scheduler, FakeWorker(scheduler.config))
    assert output_of(group) == tokens[: end + 1]
    assert group.sequences[0].status is SequenceStatus.FINISHED_STOPPED
