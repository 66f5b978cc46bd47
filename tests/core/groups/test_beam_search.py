"""Beams in the scheduler, against an exhaustive search."""

from dataclasses import replace

import pytest
from fake_worker import FakeWorker, reference_beams
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run, run_ahead, step

from scheduler_service.core import (
    ModelOutput,
    PreemptionMode,
    SequenceStatus,
)


@pytest.mark.parametrize("mode", PreemptionMode)
@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("early_stopping", [False, True])
def test_beam_search_finds_what_an_exhaustive_one_finds_through_preemptions(
    early_stopping: bool, num_ahead: int, mode: PreemptionMode
) -> None:
    scheduler = make_scheduler(num_device_blocks=14, num_host_blocks=14, preemption_mode=mode)
    groups = [
        make_group(
            str(i),
            3 * i + 1,
            root=bytes(i),
            beam_width=2 + i % 3,
            max_tokens=9,
            min_tokens=i % 3,
            eos_token_ids=frozenset(range(5 * (i % 2))),
            length_penalty=[0.0, 1.0, -0.5, 2.0][i % 4],
            early_stopping=early_stopping,
        )
        for i in range(8)
    ]
    for group in groups:
        scheduler.add_request(group)
    run_ahead(scheduler, FakeWorker(scheduler.config), num_ahead)
    assert sum(scheduler.num_preemptions.values()) > 0
    for group in groups:
        assert group.beams is not None
        assert [hypothesis.token_ids for hypothesis in group.beams.hypotheses] == reference_beams(group, 56)
    assert scheduler.blocks.device.num_free == scheduler.blocks.host.num_free == 14


def test_beams_share_their_blocks_and_are_sent_as_forks() -> None:
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler.config)
    group = make_group("a", 9, beam_width=4, max_tokens=3)
    scheduler.add_request(group)
    step(scheduler, worker)
    assert len(group.live) == 4
    assert scheduler.blocks.device.num_free == 16 - 3
    output = step(scheduler, worker)
    assert len(output.forks) == 4
    assert not output.new_sequences
    assert [fork.num_tokens for fork in output.forks] == [9] * 4
    assert len(output.blocks_to_copy) == 3
    assert len(output.finished) == 1


def test_all_the_beams_that_a_search_will_have_count_in_the_budget_from_the_start() -> None:
    scheduler = make_scheduler(max_num_seqs=6)
    scheduler.add_request(make_group("a", 3, beam_width=4))
    scheduler.add_request(make_group("b", 3, n=3))
    assert list(plan(scheduler.schedule())) == ["a"]


def test_an_answer_without_the_beams_log_probabilities_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_group("a", 3, beam_width=2))
    output = scheduler.schedule()
    with pytest.raises(ValueError, match="no log-probabilities for sequence 1"):
        scheduler.update_from_output(output, ModelOutput(1, [5]))


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_a_beam_that_fails_ends_the_search_and_leaves_nothing_behind(failed: int) -> None:
    """The others' continuations are of a search that has no end."""
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler.config)
    group, other = make_group("a", 9, beam_width=3), make_group("b", 5)
    scheduler.add_request(group)
    scheduler.add_request(other)
    step(scheduler, worker)
    output = scheduler.schedule()
    beams = group.live
    answer = replace(worker.execute(output), failed_sequence_ids=frozenset({beams[failed].id}))
    gained = scheduler.update_from_output(output, answer)
    assert {beam.status for beam in beams} == {SequenceStatus.FINISHED_FAILED}
    assert [item.sequence for item in gained if item.sequence.group is group] == [beams[failed]]
    assert not set(group.sequences) - set(beams)
    run(scheduler, worker)
    assert len(output_of(other)) == 4
    assert scheduler.blocks.device.num_free == 16
