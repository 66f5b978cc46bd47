"""Swapping and the prefix cache: what is there already, on either side, is shared and not copied."""

import pytest
from fake_worker import FakeWorker, reference_output
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run, step

from scheduler_service.core import (
    AllocStatus,
    BlockManager,
    ModelOutput,
    PreemptionMode,
    PriorityQueue,
    SamplingParams,
    Scheduler,
    SchedulerOutput,
    SequenceGroup,
    SequenceStatus,
)

TAKER = 99


def make_blocks(num_device_blocks: int = 16, num_host_blocks: int = 16) -> BlockManager:
    return BlockManager(4, num_device_blocks, num_host_blocks, prefix_caching=True)


def computed_group(
    blocks: BlockManager, number: int, num_tokens: int, num_shared: int, root: bytes = b""
) -> SequenceGroup:
    """A group on the device with all its tokens computed; the first `num_shared` are those of any other group."""
    tokens = [*range(num_shared), *range(1000 * number, 1000 * number + num_tokens - num_shared)]
    group = SequenceGroup(str(number), tokens, SamplingParams(max_tokens=8), root)
    (sequence,) = group.sequences
    sequence.id = number
    blocks.allocate(sequence)
    sequence.num_computed_tokens = sequence.num_stored_tokens = num_tokens
    blocks.cache.publish(sequence, sequence.num_stored_tokens)
    return group


def take(blocks: BlockManager, count: int) -> None:
    """Give so many blocks away, as others do while a group is swapped out."""
    group = SequenceGroup("taker", range(9000, 9000 + 4 * count), SamplingParams(max_tokens=1), b"taker")
    group.sequences[0].id = TAKER
    blocks.allocate(group.sequences[0])


def give_back_one(blocks: BlockManager, number: int = TAKER) -> None:
    blocks.device.free(blocks.tables[number].pop())


def test_blocks_that_another_group_holds_are_not_copied_back() -> None:
    """Of 11 blocks 8 are another group's too: they take none of the free ones either."""
    blocks = make_blocks(11)
    computed_group(blocks, 1, 32, 32)
    younger = computed_group(blocks, 2, 44, 32)
    shared = blocks.tables[1][:8]
    assert len(blocks.swap_out(younger)) == 11
    take(blocks, 3)
    give_back_one(blocks)
    give_back_one(blocks)
    assert blocks.can_swap_in(younger, 64, leave_watermark=False) is AllocStatus.LATER
    give_back_one(blocks)
    assert blocks.can_swap_in(younger, 64, leave_watermark=False) is AllocStatus.OK
    assert len(blocks.swap_in(younger)) == 3
    assert blocks.tables[2][:8] == shared
    blocks.check()


def test_blocks_that_are_found_but_held_by_none_are_not_copied_back_and_take_free_ones() -> None:
    blocks = make_blocks(12)
    group = computed_group(blocks, 1, 44, 44)
    before = list(blocks.tables[1])
    blocks.swap_out(group)
    take(blocks, 2)  # the one that was free, and the deepest of the group's
    assert blocks.can_swap_in(group, 64, leave_watermark=False) is AllocStatus.LATER
    give_back_one(blocks)
    assert blocks.can_swap_in(group, 64, leave_watermark=False) is AllocStatus.OK
    assert len(blocks.swap_in(group)) == 1
    assert blocks.tables[1][:10] == before[:10]
    blocks.check()


def test_a_fork_that_comes_back_to_a_block_of_others_has_room_for_its_copy_of_it() -> None:
    """It goes on within a full block that another group holds, and the sequence that filled its own has ended."""
    blocks = make_blocks(3)
    group = SequenceGroup("fork", range(8), SamplingParams(n=2, max_tokens=8))
    leader, follower = group.sequences
    leader.id, follower.id = 1, 2
    blocks.allocate(leader)
    leader.num_computed_tokens = leader.num_stored_tokens = 8
    blocks.cache.publish(leader, leader.num_stored_tokens)
    blocks.fork(leader, follower, 7)
    blocks.free(leader)
    leader.status = SequenceStatus.FINISHED_STOPPED
    follower.max_num_tokens = 16
    computed_group(blocks, 3, 9, 9)
    assert len(blocks.swap_out(group)) == 2
    assert blocks.can_swap_in(group, 64, leave_watermark=False) is AllocStatus.LATER
    give_back_one(blocks, 3)
    assert blocks.can_swap_in(group, 64, leave_watermark=False) is AllocStatus.OK
    assert blocks.swap_in(group) == []
    assert len(blocks.append_slots(follower, 1)) == 1
    blocks.check()


def test_no_block_that_a_group_finds_is_given_up_for_another_one_of_it() -> None:
    """Its second sequence's own block was let go of before any other: it would go first, for the first sequence's."""
    blocks = make_blocks(4)
    outputs = (50, 51), (60, 61, 62, 63)
    group = SequenceGroup("pair", range(4), SamplingParams(n=2, max_tokens=8), output_token_ids=outputs)
    for sequence in group.sequences:
        sequence.id = 1 + sequence.index
    leader, follower = group.sequences
    blocks.allocate(leader)
    blocks.fork(leader, follower, 4)
    blocks.append_slots(follower, 4)
    for sequence in group.sequences:
        sequence.num_computed_tokens = sequence.num_stored_tokens = len(sequence.token_ids)
        blocks.cache.publish(sequence, sequence.num_stored_tokens)
    other = computed_group(blocks, 3, 4, 0)
    assert len(blocks.swap_out(group)) == 3
    take(blocks, 1)
    blocks.free(other.sequences[0])
    assert blocks.can_swap_in(group, 64, leave_watermark=False) is AllocStatus.OK
    assert len(blocks.swap_in(group)) == 1
    blocks.check()


def test_a_block_that_was_given_away_meanwhile_is_copied_back_and_found_again() -> None:
    blocks = make_blocks(4)
    group = computed_group(blocks, 1, 12, 12)
    blocks.swap_out(group)
    take(blocks, 3)  # the one that was free, and the deepest two
    keys = group.sequences[0].block_keys
    assert [blocks.device.find(key) is not None for key in keys] == [True, False, False]
    for _ in range(3):
        give_back_one(blocks)
    pairs = blocks.swap_in(group)
    assert [device for _, device in pairs] == blocks.tables[1][1:]
    assert [blocks.device.find(key) for key in keys] == blocks.tables[1]
    blocks.check()


def test_a_prefix_that_several_groups_share_is_swapped_out_once() -> None:
    blocks = make_blocks()
    groups = [computed_group(blocks, number, 14, 8) for number in (1, 2)]
    assert [len(blocks.swap_out(group)) for group in groups] == [4, 2]
    assert blocks.host_tables[1][:2] == blocks.host_tables[2][:2]
    blocks.check()
    assert [len(blocks.swap_in(group)) for group in groups] == [1, 1]  # full blocks are still found
    assert blocks.tables[1][:2] == blocks.tables[2][:2]
    blocks.check()


def test_equal_prefixes_of_different_salts_are_swapped_apart() -> None:
    blocks = make_blocks()
    groups = [computed_group(blocks, number, 8, 8, root) for number, root in ((1, b"a"), (2, b"b"))]
    assert [len(blocks.swap_out(group)) for group in groups] == [2, 2]


def test_a_group_that_makes_room_a_second_time_copies_only_what_is_new_since_the_first() -> None:
    blocks = make_blocks()
    group = computed_group(blocks, 1, 10, 10)
    assert len(blocks.swap_out(group)) == 3
    blocks.swap_in(group)
    (sequence,) = group.sequences
    sequence.output_token_ids.extend([7, 7, 7])
    blocks.append_slots(sequence, 3)
    sequence.num_computed_tokens = sequence.num_stored_tokens = 13
    blocks.cache.publish(sequence, sequence.num_stored_tokens)
    assert len(blocks.swap_out(group)) == 2
    blocks.check()


def test_host_memory_gives_up_unreferenced_copies_before_a_group_has_to_recompute() -> None:
    blocks = make_blocks(16, num_host_blocks=3)
    first, second = (computed_group(blocks, number, 12, 0) for number in (1, 2))
    blocks.swap_out(first)
    assert not blocks.can_swap_out(second)
    blocks.swap_in(first)
    assert blocks.can_swap_out(second)
    assert len(blocks.swap_out(second)) == 3
    assert not blocks.can_swap_out(first)
    blocks.check()


def test_host_memory_that_is_full_has_room_for_a_group_whose_blocks_are_all_there() -> None:
    blocks = make_blocks(16, num_host_blocks=2)
    first, second = (computed_group(blocks, number, 8, 8) for number in (1, 2))
    blocks.swap_out(first)
    assert blocks.host.num_free == 0
    assert blocks.can_swap_out(second)
    assert blocks.swap_out(second) == []
    blocks.check()


def test_blocks_without_tokens_are_not_copied() -> None:
    """A prompt of four blocks is preempted with six tokens computed."""
    blocks = make_blocks()
    group = computed_group(blocks, 1, 16, 16)
    (sequence,) = group.sequences
    blocks.free(sequence)
    blocks.device.withdraw_all()
    blocks.allocate(sequence)
    sequence.num_computed_tokens = 6
    assert len(blocks.swap_out(group)) == 2
    assert len(blocks.swap_in(group)) == 2
    assert len(blocks.tables[1]) == 4
    blocks.check()


def test_what_is_not_sound_is_found_on_neither_side() -> None:
    blocks = make_blocks()
    sick, well = computed_group(blocks, 1, 8, 8), computed_group(blocks, 2, 12, 8)
    blocks.swap_out(well)
    blocks.cache.withdraw(sick.sequences[0])
    for key in sick.sequences[0].block_keys[:2]:
        assert blocks.device.find(key) is None
        assert blocks.host.find(key) is None
    blocks.swap_in(well)
    assert blocks.device.find(well.sequences[0].block_keys[0]) is None
    blocks.check()


def test_what_was_swapped_out_before_a_reset_is_not_found_again_when_it_comes_back() -> None:
    blocks = make_blocks()
    swapped, there = computed_group(blocks, 1, 12, 8), computed_group(blocks, 2, 8, 8)
    blocks.swap_out(swapped)
    assert blocks.cache.reset() == 3  # two that are held, and one whose holder left
    assert len(blocks.swap_in(swapped)) == 3
    for sequence in (*swapped.sequences, *there.sequences):
        assert blocks.cache.num_cached_tokens(sequence) == 0
    assert not blocks.device.num_findable
    blocks.check()


# ---- as the scheduler does it


def swap_out_last(scheduler: Scheduler, worker: FakeWorker) -> SchedulerOutput:
    while not scheduler.num_preemptions[PreemptionMode.SWAP]:
        output = step(scheduler, worker)
    return output


def with_prompt(name: str, num_shared: int, number: int, num_tokens: int, **sampling: int) -> SequenceGroup:
    tokens = [*range(num_shared), *range(1000 * number, 1000 * number + num_tokens - num_shared)]
    return SequenceGroup(name, tokens, SamplingParams(**({"max_tokens": 8} | sampling)))


def test_a_waiting_request_finds_in_the_step_of_a_swap_in_what_that_brings_back() -> None:
    """The copies of a step are done before anything is read, so the prefix is found without waiting for an answer."""
    scheduler = make_scheduler(num_device_blocks=8, num_host_blocks=8, preemption_mode=PreemptionMode.SWAP)
    worker = FakeWorker(scheduler.config)
    older, younger = with_prompt("older", 0, 1, 11, max_tokens=14), with_prompt("younger", 0, 2, 12)
    scheduler.add_request(older)
    scheduler.add_request(younger)
    swap_out_last(scheduler, worker)
    again = SequenceGroup("again", [*younger.prompt_token_ids, 5], SamplingParams(max_tokens=1))
    scheduler.add_request(again)
    while younger in scheduler.swapped:
        output = step(scheduler, worker)
    assert output.blocks_to_swap_in
    assert plan(output) == {"younger": [1], "again": [1]}
    assert again.history.num_cached_tokens == 12
    run(scheduler, worker)
    for group in (older, younger, again):
        assert output_of(group) == reference_output(group, 0, 32)


def test_what_was_computed_while_its_group_was_leaving_is_found_once_it_is_back() -> None:
    """The answer that completes a block comes when the block is in host memory."""
    scheduler = make_scheduler(
        PriorityQueue(1), num_device_blocks=4, num_host_blocks=4, preemption_mode=PreemptionMode.SWAP
    )
    worker = FakeWorker(scheduler.config)
    group, urgent = make_group("group", 12, priority=9, max_tokens=2), make_group("urgent", 13, root=b"u", max_tokens=1)
    scheduler.add_request(group)
    first = scheduler.schedule()
    first_answer = worker.execute(first)
    scheduler.add_request(urgent)
    second = scheduler.schedule()
    assert len(second.blocks_to_swap_out) == 3
    second_answer = worker.execute(second)
    scheduler.update_from_output(first, first_answer)
    scheduler.update_from_output(second, second_answer)
    scheduler.blocks.check()
    run(scheduler, worker)
    (key, *_) = group.sequences[0].block_keys
    assert scheduler.blocks.device.find(key) is not None
    assert output_of(group) == reference_output(group, 0, 16)


@pytest.mark.parametrize(("num_shared", "mode"), [(24, PreemptionMode.RECOMPUTE), (0, PreemptionMode.SWAP)])
def test_auto_counts_only_what_would_be_copied_and_what_would_be_computed_again(
    num_shared: int, mode: PreemptionMode
) -> None:
    """A copy takes as long as a token. Of seven blocks without a prefix in common it takes 14 copies to swap them, and
    at least 26 tokens to compute them; if six are shared, 7 + 1 copies and 2 tokens or a few more.
    """
    scheduler = make_scheduler(
        num_device_blocks=17 - num_shared // 4,
        num_host_blocks=16,
        preemption_mode=PreemptionMode.AUTO,
        block_bytes=1000,
        swap_bytes_per_second=1000_000,
        prefill_tokens_per_second=1000,
    )
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(older := with_prompt("older", num_shared, 1, 26, max_tokens=20))
    step(scheduler, worker)
    scheduler.add_request(younger := with_prompt("younger", num_shared, 2, 26, max_tokens=20))
    while not (num_preempted := sum(scheduler.num_preemptions.values())):
        step(scheduler, worker)
    assert num_preempted == scheduler.num_preemptions[mode] == 1
    run(scheduler, worker)
    for group in (older, younger):
        assert output_of(group) == reference_output(group, 0, scheduler.config.max_sequence_tokens)


def test_two_groups_of_one_prefix_that_make_room_in_one_step_swap_it_once() -> None:
    scheduler = make_scheduler(
        PriorityQueue(1), num_device_blocks=8, num_host_blocks=8, preemption_mode=PreemptionMode.SWAP
    )
    worker = FakeWorker(scheduler.config)
    groups = [
        SequenceGroup(name, [*range(8), number], SamplingParams(max_tokens=8), priority=9)
        for number, name in enumerate("ab")
    ]
    for group in groups:
        scheduler.add_request(group)
        step(scheduler, worker)
    assert len(scheduler.blocks.tables) == 2
    urgent = make_group("urgent", 30, root=b"u", max_tokens=1)
    scheduler.add_request(urgent)
    output = step(scheduler, worker)
    assert list(plan(output)) == ["urgent"]
    assert set(scheduler.swapped) == set(groups)
    assert len(output.blocks_to_swap_out) == 2 + 1 + 1
    run(scheduler, worker)
    assert scheduler.blocks.host.num_free == 8
    for group in (*groups, urgent):
        assert output_of(group) == reference_output(group, 0, 32)


def test_a_swapped_group_that_is_aborted_leaves_the_shared_copies_to_the_others() -> None:
    scheduler = make_scheduler(
        PriorityQueue(1), num_device_blocks=8, num_host_blocks=8, preemption_mode=PreemptionMode.SWAP
    )
    worker = FakeWorker(scheduler.config)
    groups = [
        SequenceGroup(name, [*range(8), number], SamplingParams(max_tokens=8), priority=9)
        for number, name in enumerate("ab")
    ]
    for group in groups:
        scheduler.add_request(group)
        step(scheduler, worker)
    scheduler.add_request(make_group("urgent", 30, root=b"u", max_tokens=1))
    step(scheduler, worker)
    scheduler.finish_requests(["a"], SequenceStatus.FINISHED_ABORTED)
    scheduler.blocks.check()
    run(scheduler, worker)
    assert output_of(groups[1]) == reference_output(groups[1], 0, 32)


def test_a_sequence_that_fails_while_it_is_swapped_out_leaves_nothing_to_be_found() -> None:
    scheduler = make_scheduler(
        PriorityQueue(1), num_device_blocks=4, num_host_blocks=4, preemption_mode=PreemptionMode.SWAP
    )
    worker = FakeWorker(scheduler.config)
    sick, urgent = make_group("sick", 11, priority=9, max_tokens=3), make_group("urgent", 13, root=b"u", max_tokens=1)
    scheduler.add_request(sick)
    step(scheduler, worker)
    keys = list(sick.sequences[0].block_keys)
    second = scheduler.schedule()
    scheduler.add_request(urgent)
    third = scheduler.schedule()
    assert third.blocks_to_swap_out
    failed = frozenset({second.scheduled[0].sequence.id})
    scheduler.update_from_output(second, ModelOutput(2, [0], failed_sequence_ids=failed))
    scheduler.blocks.check()
    assert sick.is_finished
    assert keys
    for key in keys:
        assert scheduler.blocks.host.find(key) is None
        assert scheduler.blocks.device.find(key) is None
