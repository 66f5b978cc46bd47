"""Blocks that fell behind a sliding window."""

import pytest
from fake_worker import FakeWorker, reference_output
from scheduler_helpers import make_group, make_scheduler, output_of, plan, run, step

from scheduler_service.core import ModelOutput, PreemptionMode, PriorityQueue, SequenceStatus, WaitingQueue
from scheduler_service.core.blocks.allocator import BlockAllocator, Content
from scheduler_service.core.blocks.prefix_cache import KEY_BYTES
from scheduler_service.core.config import LayerGroup


def test_blocks_behind_a_sliding_window_are_used_again() -> None:
    """32 tokens in a pool of 3 blocks of 4: a window of 5 and chunks of 4 touch at most 3 blocks at a time."""
    scheduler = make_scheduler(
        num_device_blocks=3, max_num_batched_tokens=4, max_num_seqs=1, sliding_window=5, max_model_len=100
    )
    assert scheduler.config.max_sequence_tokens == 100
    group = make_group("a", 20, max_tokens=12)
    scheduler.add_request(group)
    run(scheduler, FakeWorker(scheduler.config))
    assert output_of(group) == reference_output(group, 0, 100)
    assert sum(scheduler.num_preemptions.values()) == 0


def test_blocks_behind_a_sliding_window_are_free_before_a_sequence_needs_one() -> None:
    """A window of 2 in blocks of 4: while position 5 is computed no token attends to the first block any more."""
    scheduler = make_scheduler(sliding_window=2, max_num_batched_tokens=8)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("a", 3, max_tokens=20))
    in_use = []
    for _ in range(7):
        step(scheduler, worker)
        in_use.append(16 - scheduler.blocks.device.num_free)
    # Computed before each step: 0, 3, 4, 5, 6, 7, 8 tokens.
    assert in_use == [1, 1, 2, 1, 1, 1, 2]


def test_blocks_of_a_chunk_are_free_once_the_next_chunk_begins() -> None:
    """Chunks of 8 tokens in blocks of 4. A prefix of 8 tokens needs no block of the first chunk."""
    layers = (LayerGroup(4), LayerGroup(4, window=8, chunked=True))
    scheduler = make_scheduler(max_num_batched_tokens=8, num_device_blocks=40, layer_groups=layers)
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("a", 8, max_tokens=20))
    step(scheduler, worker)
    (table,) = scheduler.blocks.all_tables[1].values()
    of_first_chunk, in_use = table[:2], []
    for _ in range(3):
        step(scheduler, worker)
        in_use.append(40 - scheduler.blocks.device.num_free)
    assert in_use == [4, 4, 4]  # three blocks without a chunk, and one of the second chunk
    for block in of_first_chunk:
        scheduler.blocks.device.withdraw(block)
    assert scheduler.blocks.cache.num_cached_tokens(make_group("again", 12).live[0]) == 8


def test_a_prompt_that_is_longer_than_the_pool_can_be_swapped_out_and_comes_back() -> None:
    """Of 60 tokens in a pool of 14 a window of 4 and a step's 4 tokens take 7 at a time."""
    scheduler = make_scheduler(
        PriorityQueue(),
        block_size=1,
        num_device_blocks=14,
        num_host_blocks=14,
        max_num_batched_tokens=4,
        max_prefill_chunk=2,
        max_num_seqs=1,
        sliding_window=4,
        prefix_caching=False,
        preemption_mode=PreemptionMode.SWAP,
    )
    worker = FakeWorker(scheduler.config)
    long, urgent = make_group("long", 60, priority=1), make_group("urgent", 2)
    scheduler.add_request(long)
    step(scheduler, worker)
    scheduler.add_request(urgent)
    assert plan(step(scheduler, worker)) == {"urgent": [2]}
    assert list(scheduler.swapped) == [long]
    run(scheduler, worker)
    assert output_of(long) == reference_output(long, 0, 64)
    assert output_of(urgent) == reference_output(urgent, 0, 64)


@pytest.mark.parametrize(("window", "chunk"), [(4, 8), (0, 32)])
def test_a_long_prompt_alone_computes_no_larger_chunks_with_a_window(window: int, chunk: int) -> None:
    """They would need blocks of the windows' layers for 32 tokens."""
    layers = (LayerGroup(4), LayerGroup(4, window))
    scheduler = make_scheduler(
        max_num_batched_tokens=32, max_prefill_chunk=8, num_device_blocks=64, layer_groups=layers
    )
    worker = FakeWorker(scheduler.config)
    scheduler.add_request(make_group("long", 80))
    assert [plan(step(scheduler, worker)) for _ in range(2)] == 2 * [{"long": [chunk]}]


def test_an_ended_output_releases_no_blocks_of_the_sequence_that_has_its_id_on_the_next_worker() -> None:
    waiting = WaitingQueue()
    lost = make_scheduler(waiting, sliding_window=2, max_num_batched_tokens=8)
    group, worker = make_group("a", 9, max_tokens=9, n=2), FakeWorker(lost.config)
    lost.add_request(group)
    for _ in range(6):
        step(lost, worker)
    ended, live = group.sequences
    lost.finish_sequence(ended, SequenceStatus.FINISHED_ABORTED)
    lost.release_all()
    scheduler = make_scheduler(waiting, sliding_window=2, max_num_batched_tokens=8)
    worker = FakeWorker(scheduler.config)
    step(scheduler, worker)
    assert live.id == ended.id
    run(scheduler, worker)
    assert output_of(group, 1) == reference_output(group, 1, 64)


def test_what_a_sequence_with_unsound_logits_stored_behind_its_window_is_never_found() -> None:
    scheduler = make_scheduler(sliding_window=2, max_num_batched_tokens=8)
    scheduler.add_request(make_group("sick", 11))
    scheduler.update_from_output(scheduler.schedule(), ModelOutput(1, []))
    second = scheduler.schedule()
    sick = second.scheduled[0].sequence
    assert next(scheduler.blocks.blocks_of(sick)) == scheduler.blocks.tables[sick.id][1], "the first one is behind it"
    scheduler.update_from_output(second, ModelOutput(2, [0], failed_sequence_ids=frozenset({sick.id})))
    scheduler.add_request(make_group("well", 5))
    assert plan(scheduler.schedule()) == {"well": [5]}


def test_unsound_blocks_are_forgotten_in_all_groups_of_layers() -> None:
    """Also those of a sequence that began with the sick one's, behind a block that one group of layers has lost."""
    layers = (LayerGroup(2), LayerGroup(4, window=6))
    scheduler = make_scheduler(max_num_batched_tokens=11, num_device_blocks=40, layer_groups=layers)
    scheduler.add_request(make_group("sick", 14))
    first = scheduler.schedule()
    scheduler.add_request(make_group("built", 24))
    scheduler.update_from_output(first, ModelOutput(1, []))
    second = scheduler.schedule()
    assert plan(second) == {"sick": [3], "built": [8]}
    sick, built = (scheduled.sequence for scheduled in second.scheduled)
    scheduler.blocks.device.withdraw(scheduler.blocks.tables[built.id][7])
    scheduler.update_from_output(second, ModelOutput(2, [0], failed_sequence_ids=frozenset({sick.id})))
    assert scheduler.blocks.device.num_findable == 0


def test_a_prefix_that_no_window_has_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks behind a window are evicted first. Layers without a window may still have a whole long context."""
    scheduler = make_scheduler(
        num_device_blocks=600, max_model_len=1_000, layer_groups=(LayerGroup(4), LayerGroup(4, window=9))
    )
    scheduler.add_request(make_group("a", 801, max_tokens=1))
    run(scheduler, FakeWorker(scheduler.config))
    device = scheduler.blocks.device
    again = make_group("b", 801)
    assert scheduler.blocks.cache.num_cached_tokens(again.live[0]) == 800
    for block in range(device.num_blocks):
        if len(device.key(block) or b"") > KEY_BYTES:  # of layers with a window
            device.withdraw(block)
    num_found = 0

    def find(content: Content) -> int | None:
        nonlocal num_found
        num_found += 1
        return BlockAllocator.find(device, content)

    monkeypatch.setattr(device, "find", find)
    assert scheduler.blocks.cache.num_cached_tokens(again.live[0]) == 0
    assert num_found <= 2 * 800 // 4
