"""Blocks with states, of which a sequence has one in each group, and where they are kept for the prefix cache."""

from unittest import mock

import pytest
from fake_worker import FakeWorker, reference_output
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run, run_ahead, step

from scheduler_service.core import Scheduler, SequenceGroup
from scheduler_service.core.blocks import states
from scheduler_service.core.config import LayerGroup


def with_states(**sizes: object) -> Scheduler:
    """A worker with blocks of 4 tokens and one block of states for each sequence."""
    return make_scheduler(**{"num_device_blocks": 64, "layer_groups": (LayerGroup(4), LayerGroup(0))} | sizes)


def served(scheduler: Scheduler, worker: FakeWorker, name: str, num_tokens: int, **more: object) -> SequenceGroup:
    group = make_group(name, num_tokens, **more)
    scheduler.add_request(group)
    run(scheduler, worker)
    for index in range(len(group.sequences)):
        assert output_of(group, index) == reference_output(group, index, 64)
    return group


def test_a_prompt_is_found_up_to_its_last_border_where_its_states_were_kept() -> None:
    scheduler = with_states()
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("a", 30, max_tokens=1))
    assert [plan(step(scheduler, worker)) for _ in range(2)] == [{"a": [28]}, {"a": [2]}]
    assert served(scheduler, worker, "b", 31).history.num_cached_tokens == 28


def test_states_are_kept_where_a_prompt_continues_differently_than_an_earlier_one() -> None:
    """Only the second prompt shows where the common part ends; the third one finds it."""
    scheduler = with_states()
    worker = FakeWorker(scheduler.config)
    cached = []
    for name, num_tokens in (("a", 41), ("b", 21), ("c", 22)):
        group = make_group(name, num_tokens, max_tokens=1)
        group.prompt_token_ids[16:] = type(group.prompt_token_ids)("I", [ord(name)] * (num_tokens - 16))
        scheduler.add_request(group)
        run(scheduler, worker)
        cached.append(group.history.num_cached_tokens)
    assert cached == [0, 0, 16]


@mock.patch.object(states, "OUTPUT_SPACING", 8)
def test_an_output_keeps_the_states_of_its_last_border_alone() -> None:
    scheduler = with_states()
    worker = FakeWorker(scheduler.config)
    served(scheduler, worker, "a", 8, max_tokens=20)
    so_far = [*range(8), *reference_output(make_group("a", 8, max_tokens=20), 0, 64)]
    found = []
    for length in (13, 27, 28):
        later = make_group(str(length), length, max_tokens=1)
        later.prompt_token_ids[:] = type(later.prompt_token_ids)("I", so_far[:length])
        scheduler.add_request(later)
        run(scheduler, worker)
        found.append(later.history.num_cached_tokens)
    assert found == [8, 24, 24]


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 11])
def test_several_outputs_share_the_states_before_the_last_prompt_token(num_tokens: int) -> None:
    scheduler = with_states()
    worker = FakeWorker(scheduler.config)
    served(scheduler, worker, "a", num_tokens, n=3)
    served(scheduler, worker, "b", num_tokens, n=3)
    later = served(scheduler, worker, "c", num_tokens + 1)
    assert later.history.num_cached_tokens == (num_tokens - 1) // 4 * 4


def test_no_states_are_kept_if_running_sequences_need_the_blocks() -> None:
    """12 tokens, and one block with states, in a pool of 4 blocks."""
    scheduler = with_states(num_device_blocks=4)
    worker = FakeWorker(scheduler.config)
    served(scheduler, worker, "a", 9, max_tokens=3)
    assert sum(scheduler.num_preemptions.values()) == 0
    assert served(scheduler, worker, "b", 9, max_tokens=3).history.num_cached_tokens == 0


def test_a_model_with_states_alone_needs_one_block_for_a_text_of_any_length() -> None:
    scheduler = with_states(num_device_blocks=2, layer_groups=(LayerGroup(0),))
    worker = FakeWorker(scheduler.config)
    assert scheduler.config.max_sequence_tokens == 64
    served(scheduler, worker, "a", 40)
    assert served(scheduler, worker, "b", 41).history.num_cached_tokens == 36


def test_a_reset_removes_states_and_those_that_running_sequences_would_keep() -> None:
    scheduler = with_states()
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("a", 10, max_tokens=20))
    for _ in range(4):
        step(scheduler, worker)
    assert scheduler.reset_prefix_cache() > 0
    run(scheduler, worker)
    assert scheduler.blocks.device.num_findable == 0
    assert scheduler.blocks.device.num_free == 64


def test_states_that_are_kept_for_the_cache_end_no_request_that_needs_their_block() -> None:
    """A pool has one block for each of two outputs. The step that fills the kept block is in flight when they fork."""
    scheduler = make_scheduler(
        layer_groups=(LayerGroup(0),), block_size=1, num_device_blocks=2, watermark=0.0, max_num_batched_tokens=12
    )
    group, worker = make_group("a", 14, n=2), FakeWorker(scheduler.config)
    scheduler.add_request(group)
    run_ahead(scheduler, worker, 1)
    assert [output_of(group, index) for index in range(2)] == [reference_output(group, index, 64) for index in range(2)]


def test_requests_that_arrive_together_wait_until_one_of_them_has_kept_the_common_states() -> None:
    scheduler = with_states(max_num_batched_tokens=16, max_prefill_chunk=8)
    worker = FakeWorker(scheduler.config)
    groups = [make_group(name, 22 + number, max_tokens=1) for number, name in enumerate("abcd")]
    for group in groups:
        group.prompt_token_ids[18:] = type(group.prompt_token_ids)(
            "I", [ord(group.request_id)] * (len(group.prompt_token_ids) - 18)
        )
        scheduler.add_request(group)
    run(scheduler, worker)
    assert [group.history.num_cached_tokens for group in groups] == [0, 16, 16, 16]
