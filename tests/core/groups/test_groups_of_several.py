"""Several outputs of one prompt."""

import pytest
from fake_worker import FakeWorker, reference_output
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run, run_ahead, step

from scheduler_service.core import (
    SequenceStatus,
)


def test_n_outputs_share_the_prompts_blocks_until_they_write() -> None:
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler.config)
    group = make_group("a", 8, n=3, max_tokens=3)
    scheduler.add_request(group)
    step(scheduler, worker)
    tables = [scheduler.blocks.tables[sequence.id] for sequence in group.sequences]
    assert tables[0][:2] == tables[1] == tables[2]
    output = step(scheduler, worker)
    assert not output.new_sequences
    assert [fork.child.index for fork in output.forks] == [1, 2]
    run(scheduler, worker)
    assert [output_of(group, index) for index in range(3)] == [reference_output(group, index, 64) for index in range(3)]


def test_an_output_that_ends_with_its_first_token_leaves_the_prompt_to_the_others() -> None:
    group = make_group("a", 6, n=2, max_tokens=3)
    first = reference_output(group, 0, 64)[0]
    group = make_group("a", 6, n=2, max_tokens=3, eos_token_ids=frozenset({first}))
    scheduler = make_scheduler()
    scheduler.add_request(group)
    run(scheduler, FakeWorker(scheduler.config))
    assert output_of(group, 0) == [first]
    assert output_of(group, 1) == reference_output(group, 1, 64)


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_leader_that_ends_before_the_others_could_fork_leaves_the_prompt_to_them(num_ahead: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    worker = FakeWorker(scheduler.config)
    group = make_group("a", 20, n=3)
    scheduler.add_request(group)
    step(scheduler, worker)
    scheduler.finish_sequence(group.sequences[0], SequenceStatus.FINISHED_STOPPED)
    run_ahead(scheduler, worker, num_ahead)
    assert output_of(group, 0) == []
    assert [output_of(group, index) for index in (1, 2)] == [reference_output(group, index, 64) for index in (1, 2)]
    assert group.prompt_token_ids.tolist() == list(range(20))


def test_outputs_that_together_outgrow_the_pool_end_the_group_not_the_engine() -> None:
    scheduler = make_scheduler(num_device_blocks=4)
    group = make_group("a", 4, n=4, max_tokens=12)
    scheduler.add_request(group)
    run(scheduler, FakeWorker(scheduler.config))
    assert {sequence.status for sequence in group.sequences} == {SequenceStatus.FINISHED_IGNORED}
    assert scheduler.blocks.device.num_free == 4


def test_a_group_that_outgrew_the_pool_leaves_its_place_to_the_next_in_the_same_step() -> None:
    scheduler = make_scheduler(num_device_blocks=2, max_num_seqs=2)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("outgrows", 3, n=2, max_tokens=9))
    scheduler.add_request(make_group("next", 4))
    while not (output := step(scheduler, worker)).ignored:
        pass
    assert list(plan(output)) == ["next"]
