"""What a group is promised room for: its outputs at their longest, counted before anything is given up for it."""

import itertools
from random import Random

import pytest
from fake_worker import FakeWorker, reference_output
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import make_group, make_scheduler, output_of, run, run_ahead, step
from workloads import random_config, random_request, with_layer_groups

from scheduler_service.core import Scheduler, SequenceGroup, SequenceStatus, WaitingQueue

ENDS = {SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH_CAPPED}


def random_group(rng: Random, longest: int) -> SequenceGroup:
    """New, or one that goes on where another scheduler left it."""
    request = random_request(rng, 0)
    new = request.group()
    if new.beams or rng.random() < 0.5:
        return new
    whole = [reference_output(new, index, longest) for index in range(request.sampling.n)]
    so_far = tuple(tuple(tokens[: rng.randrange(len(tokens))]) for tokens in whole)
    return SequenceGroup("resumed", request.prompt, request.sampling, request.root, output_token_ids=so_far)


@settings(max_examples=500)
@given(st.integers(0, 2**32), st.integers(0, 2), st.integers(0, 12))
def test_a_group_that_fits_alone_is_never_ended_before_its_promised_length(
    seed: int, num_ahead: int, lost_at: int
) -> None:
    """Whether it is new, resumed or begins anew on another worker, and with windows, beams or room for drafts."""
    rng = Random(seed)
    config, waiting = with_layer_groups(random_config(rng, range(1, 24)), seed), WaitingQueue()
    group = random_group(rng, config.max_sequence_tokens)
    scheduler = Scheduler(config, waiting)
    if group.num_seqs > config.max_num_seqs or scheduler.blocks.never_fits(group):
        return
    scheduler.add_request(group)
    worker = FakeWorker(config)
    for _ in range(lost_at):
        step(scheduler, worker)
    if not group.is_finished:
        scheduler.release_all()
        scheduler, worker = Scheduler(config, waiting), FakeWorker(config)
        run_ahead(scheduler, worker, num_ahead)
    assert {sequence.status for sequence in group.sequences} <= ENDS
    if not group.beams:
        for index in range(len(group.sequences)):
            assert output_of(group, index) == reference_output(group, index, config.max_sequence_tokens)


@given(st.integers(1, 4), st.integers(1, 24), st.integers(1, 5), st.integers(1, 12), st.integers(0, 3))
def test_a_group_is_refused_for_no_block_more_than_it_would_take(
    block_size: int, num_prompt_tokens: int, n: int, max_tokens: int, num_lookahead_slots: int
) -> None:
    """In the smallest pool that it fits there is a moment when no block is free, with a step planned ahead."""

    def scheduler(num_blocks: int) -> Scheduler:
        return make_scheduler(
            num_device_blocks=num_blocks, block_size=block_size, num_lookahead_slots=num_lookahead_slots
        )

    def group() -> SequenceGroup:
        return make_group("a", num_prompt_tokens, n=n, max_tokens=max_tokens)

    smallest = num_lookahead_slots // block_size + 1  # in which a sequence has a token
    num_blocks = next(
        number for number in itertools.count(smallest) if not scheduler(number).blocks.never_fits(group())
    )
    fits = scheduler(num_blocks)
    fits.add_request(group())
    num_free, in_flight, worker = [num_blocks], [], FakeWorker(fits.config)
    while fits.has_work:
        output = fits.schedule()
        num_free.append(fits.blocks.device.num_free)
        if not output.is_empty:
            in_flight.append((output, worker.execute(output)))
        if output.is_empty or len(in_flight) == 2:
            fits.update_from_output(*in_flight.pop(0))
    assert min(num_free) == 0 or num_blocks == smallest


@pytest.mark.parametrize("num_prompt_tokens", [7, 8])
def test_outputs_whose_copies_of_the_last_prompt_block_do_not_fit_are_refused_before_others_are_preempted(
    num_prompt_tokens: int,
) -> None:
    """Three outputs share the first block of the prompt, and each writes to a second one of its own."""
    scheduler = make_scheduler(num_device_blocks=3)
    worker = FakeWorker(scheduler.config)
    group, other = make_group("group", num_prompt_tokens, n=3, max_tokens=1), make_group("other", 2, max_tokens=2)
    scheduler.add_request(group)
    scheduler.add_request(other)
    assert step(scheduler, worker).ignored == [group]
    if num_prompt_tokens == 8:
        assert group.error is not None
        assert "3 sequence(s) of up to 9 tokens do not fit the worker, which has 3 blocks of 4 tokens" in group.error
    run(scheduler, worker)
    assert sum(scheduler.num_preemptions.values()) == 0
    assert output_of(other) == reference_output(other, 0, 12)
