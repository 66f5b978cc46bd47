"""What was computed once is found again, by requests that may, as long as it is there."""

from itertools import takewhile

import pytest
from fake_worker import FakeWorker, reference_output
from hypothesis import given
from hypothesis import strategies as st
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run, step

from scheduler_service.core import (
    ModelOutput,
    SamplingParams,
    SequenceGroup,
)
from scheduler_service.core.blocks.allocator import BlockAllocator
from scheduler_service.core.blocks.found_runs import FoundRuns

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=4)
STEPS = st.lists(st.tuples(st.sampled_from(["look", "look", "look", "publish", "withdraw"]), st.integers(0, 99)))


def test_a_prompt_that_was_computed_is_found_while_and_after_a_sequence_holds_it() -> None:
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler.config)
    first, second, third = (make_group(name, 11) for name in ("first", "second", "third"))
    scheduler.add_request(first)
    step(scheduler, worker)
    scheduler.add_request(second)
    assert plan(step(scheduler, worker)) == {"first": [1], "second": [3]}
    run(scheduler, worker)
    assert scheduler.blocks.device.num_free == 16
    scheduler.add_request(third)
    assert plan(step(scheduler, worker)) == {"third": [3]}
    assert [group.history.num_cached_tokens for group in (first, second, third)] == [0, 8, 8]
    run(scheduler, worker)
    assert output_of(first) == output_of(second) == output_of(third) == reference_output(first, 0, 64)


def test_output_is_found_too_and_the_last_token_is_always_computed() -> None:
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler.config)
    first = make_group("first", 6, max_tokens=7)
    scheduler.add_request(first)
    run(scheduler, worker)
    continued = SequenceGroup("continued", first.sequences[0].token_ids[:12], SamplingParams(max_tokens=2))
    scheduler.add_request(continued)
    assert plan(step(scheduler, worker)) == {"continued": [4]}  # of three full blocks two are used


@pytest.mark.parametrize("other", [{"root": b"another salt"}, {"adapter_id": "a"}, {"prompt_logprobs": 1}])
def test_prompts_of_another_salt_or_adapter_or_whose_log_probabilities_are_wanted_are_computed_whole(
    other: dict[str, object],
) -> None:
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("first", 11))
    run(scheduler, worker)
    scheduler.add_request(make_group("other", 11, **other))  # type: ignore[arg-type]
    assert plan(step(scheduler, worker)) == {"other": [11]}


def test_what_a_sequence_with_unsound_logits_stored_is_never_found() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(make_group("sick", 11))
    first = scheduler.schedule()
    scheduler.update_from_output(first, ModelOutput(1, []))
    second = scheduler.schedule()
    failed = frozenset({second.scheduled[0].sequence.id})
    scheduler.update_from_output(second, ModelOutput(2, [0], failed_sequence_ids=failed))
    scheduler.add_request(make_group("well", 11))
    assert plan(scheduler.schedule()) == {"well": [8]}


def test_what_a_sequence_stored_that_its_own_parameters_end_is_found() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(make_group("barred", 11))
    scheduler.update_from_output(scheduler.schedule(), ModelOutput(1, []))
    second = scheduler.schedule()
    barred = frozenset({second.scheduled[0].sequence.id})
    scheduler.update_from_output(second, ModelOutput(2, [0], failed_sequence_ids=barred, barred_sequence_ids=barred))
    scheduler.add_request(make_group("well", 11))
    assert plan(scheduler.schedule()) == {"well": [3]}


def test_what_was_built_on_unsound_blocks_is_not_found_either_and_is_published_no_more() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(make_group("sick", 11))
    first = scheduler.schedule()
    scheduler.add_request(make_group("built", 19, max_tokens=9))
    scheduler.update_from_output(first, ModelOutput(1, []))
    second = scheduler.schedule()
    assert plan(second) == {"sick": [3], "built": [5]}
    sick = second.scheduled[0].sequence
    scheduler.update_from_output(second, ModelOutput(2, [0], failed_sequence_ids=frozenset({sick.id})))
    while not (output := scheduler.schedule()).is_empty:
        scheduler.update_from_output(output, ModelOutput(output.step_id, [1] * output.num_samples))
    scheduler.add_request(make_group("well", 11))
    output = scheduler.schedule()
    assert plan(output) == {"well": [8]}
    scheduler.update_from_output(output, ModelOutput(output.step_id, []))
    scheduler.blocks.check()
    # The blocks that "well" computed anew lead to none of those that were built on the unsound ones.
    assert scheduler.blocks.cache.num_cached_tokens(make_group("longer", 19).live[0]) == 8


def test_a_preempted_group_finds_what_is_left_of_its_own_blocks() -> None:
    scheduler = make_scheduler(num_device_blocks=8, block_size=2)
    worker = FakeWorker(scheduler.config)
    for name, root in (("older", b"a"), ("younger", b"b")):
        scheduler.add_request(make_group(name, 5, root=root, max_tokens=9))
    while not sum(scheduler.num_preemptions.values()):
        step(scheduler, worker)
    younger = scheduler.waiting.head
    while younger not in scheduler.running:
        output = step(scheduler, worker)
    assert 0 < plan(output)["younger"][0] < len(younger.sequences[0].token_ids)
    run(scheduler, worker)
    assert output_of(younger) == reference_output(younger, 0, 16)


def test_after_a_reset_nothing_computed_before_is_found_and_running_requests_keep_their_blocks() -> None:
    scheduler = make_scheduler()
    worker = FakeWorker(scheduler.config)
    running, later, last = (make_group(name, 11) for name in ("running", "later", "last"))
    scheduler.add_request(running)
    step(scheduler, worker)
    num_free = scheduler.blocks.device.num_free
    assert scheduler.reset_prefix_cache() == 2
    assert scheduler.reset_prefix_cache() == 0
    assert scheduler.blocks.device.num_free == num_free
    scheduler.add_request(later)
    assert plan(step(scheduler, worker)) == {"running": [1], "later": [11]}
    scheduler.add_request(last)
    assert plan(step(scheduler, worker)) == {"running": [1], "later": [1], "last": [3]}
    run(scheduler, worker)
    assert output_of(running) == output_of(later) == output_of(last) == reference_output(running, 0, 64)


@given(PROMPTS, STEPS)
def test_a_run_is_as_long_as_one_that_is_looked_up_anew(prompts: list[list[int]], steps: list[tuple[str, int]]) -> None:
    blocks = BlockAllocator(64)
    runs = FoundRuns(blocks)
    keys = [[bytes(prompt[: end + 1]) for end in range(len(prompt))] for prompt in prompts]
    there = {key: blocks.allocate() for chain in keys for key in chain}
    for key, block in there.items():
        blocks.publish(block, key, key[:-1])
    for action, number in steps:
        chain = keys[number % len(keys)]
        key = chain[number % len(chain)]
        if action == "publish":
            blocks.publish(there[key], key, key[:-1])
        elif action == "withdraw":
            blocks.withdraw(there[key])
        else:
            for start in range(len(chain) + 1):
                found = list(takewhile(lambda key: blocks.find(key) is not None, chain[start:]))
                assert runs.find(chain, start, len(chain)).end == start + len(found)


def test_a_run_that_was_found_for_one_prompt_is_not_looked_up_for_another() -> None:
    blocks = BlockAllocator(1000)
    runs = FoundRuns(blocks)
    one, other = ([b"%d %d" % (number if place > 700 else 0, place) for place in range(1000)] for number in (1, 2))
    for key, parent in zip(one, [b"", *one], strict=False):
        blocks.publish(blocks.allocate(), key, parent)
    assert runs.find(one, 0, 1000) == (1000, 1001)
    assert runs.find(one, 0, 1000).num_looked_up < 20
    assert runs.find(other, 0, 1000).end == 701
    assert runs.find(other, 0, 1000).num_looked_up < 20
