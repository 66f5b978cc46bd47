import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core import AllocStatus, BlockAllocator, BlockManager, SamplingParams, SequenceGroup


def make_group(num_tokens: int, n: int = 1) -> SequenceGroup:
    group = SequenceGroup("r", range(num_tokens), SamplingParams(n=n, max_tokens=100))
    for sequence in group.sequences:
        sequence.id = 1 + sequence.index
    return group


def test_a_block_is_free_again_only_when_its_last_holder_lets_go() -> None:
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    allocator.share(block)
    allocator.free(block)
    assert allocator.num_free == 1
    allocator.free(block)
    assert allocator.num_free == 2


def test_freeing_or_sharing_a_free_block_is_refused() -> None:
    allocator = BlockAllocator(1)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(0)
    with pytest.raises(ValueError, match="cannot be shared"):
        allocator.share(0)


@given(st.lists(st.sampled_from(["allocate", "share", "free"]), max_size=60))
def test_free_and_held_always_add_up(operations: list[str]) -> None:
    allocator, held = BlockAllocator(5), []
    for operation in operations:
        if operation == "allocate" and allocator.num_free:
            held.append(allocator.allocate())
        elif operation == "share" and held:
            allocator.share(held[0])
            held.append(held[0])
        elif operation == "free" and held:
            allocator.free(held.pop())
        allocator.check()
        assert allocator.num_free == 5 - len(set(held))


def test_blocks_are_given_up_least_recently_used_first_and_the_deepest_of_a_sequence_before_the_others() -> None:
    blocks = BlockManager(block_size=1, num_device_blocks=6, prefix_caching=True)
    keys = {}
    for name in ("older", "newer"):
        group = SequenceGroup(name, range(3), SamplingParams(max_tokens=1), name.encode())
        (sequence,) = group.sequences
        blocks.allocate(sequence)
        sequence.num_stored_tokens = 3
        blocks.cache.publish(sequence, sequence.num_stored_tokens)
        keys[name] = list(sequence.block_keys)
        blocks.free(sequence)
    gone = []
    for _ in range(6):
        blocks.device.allocate()
        blocks.device.check()
        gone.append(
            next(
                (name, depth)
                for name in keys
                for depth in range(3)
                if blocks.device.find(keys[name][depth]) is None and (name, depth) not in gone
            )
        )
    assert gone == [("older", 2), ("older", 1), ("older", 0), ("newer", 2), ("newer", 1), ("newer", 0)]


def test_a_group_that_is_swapped_out_lets_go_of_its_last_blocks_first_too() -> None:
    blocks = BlockManager(block_size=1, num_device_blocks=3, num_host_blocks=3, prefix_caching=True)
    group = make_group(3)
    (sequence,) = group.sequences
    blocks.allocate(sequence)
    sequence.num_stored_tokens = 3
    blocks.cache.publish(sequence, sequence.num_stored_tokens)
    blocks.swap_out(group)
    blocks.device.allocate()
    assert [blocks.device.find(key) is not None for key in sequence.block_keys] == [True, True, False]


@given(st.lists(st.tuples(st.sampled_from(["allocate", "publish", "find", "free", "withdraw"]), st.integers(0, 3))))
def test_the_cache_never_confuses_free_held_and_findable(operations: list[tuple[str, int]]) -> None:
    allocator, held, keys = BlockAllocator(4), [], {}
    carried: dict[int, bytes] = {}
    for operation, number in operations:
        key = bytes([number])
        if operation == "allocate" and allocator.num_free:
            held.append(allocator.allocate())
            keys = {k: b for k, b in keys.items() if b != held[-1]}
            carried.pop(held[-1], None)
        elif operation == "publish" and held:
            if held[-1] not in carried:
                carried[held[-1]] = key
                keys.setdefault(key, held[-1])
            allocator.publish(held[-1], key, b"")
        elif operation == "find" and (block := allocator.find(key)) is not None:
            allocator.share(block)
            held.append(block)
        elif operation == "free" and held:
            allocator.free(block := held.pop(0))
            if block not in held and block not in keys.values():
                carried.pop(block, None)
        elif operation == "withdraw":
            allocator.withdraw(number)  # held or free
            keys = {k: b for k, b in keys.items() if b != number}
            carried.pop(number, None)
        allocator.check()
        assert allocator.num_free == 4 - len(set(held))
        assert {b: k for b in range(4) if (k := allocator.key(b)) is not None} == carried
        assert {bytes([n]): b for n in range(4) if (b := allocator.find(bytes([n]))) is not None} == keys


@pytest.mark.parametrize(
    ("num_tokens", "taken", "status"),
    [
        (16, 0, AllocStatus.OK),  # exactly the pool
        (17, 0, AllocStatus.NEVER),
        (12, 1, AllocStatus.OK),
        (13, 1, AllocStatus.LATER),
    ],
)
def test_can_allocate_answers_now_later_or_never(num_tokens: int, taken: int, status: AllocStatus) -> None:
    blocks = BlockManager(block_size=4, num_device_blocks=4)
    for _ in range(taken):
        blocks.device.allocate()
    assert blocks.can_allocate(make_group(num_tokens), leave_watermark=False) is status


def test_the_watermark_is_left_free_only_when_asked() -> None:
    blocks = BlockManager(block_size=4, num_device_blocks=4, watermark=0.25)
    assert blocks.can_allocate(make_group(16), leave_watermark=True) is AllocStatus.LATER
    assert blocks.can_allocate(make_group(16), leave_watermark=False) is AllocStatus.OK


def test_writing_to_a_shared_block_copies_it_and_the_last_writer_keeps_the_original() -> None:
    blocks = BlockManager(block_size=4, num_device_blocks=4)
    group = make_group(6, n=2)
    parent, child = group.sequences
    blocks.allocate(parent)
    original = list(blocks.tables[parent.id])
    parent.num_computed_tokens, child.num_computed_tokens = 6, 5
    blocks.fork(parent, child, 5)
    chunks = [(parent, 1), (child, 1)]
    assert blocks.can_append_slots(chunks)
    assert blocks.tell(parent, whole=False) == [(0, 0, original)]
    assert blocks.append_slots(parent, 1) == [(original[1], blocks.tables[parent.id][1])]
    assert blocks.tell(parent, whole=False) == [(0, 1, blocks.tables[parent.id][1:])]
    assert blocks.append_slots(child, 1) == []
    assert blocks.tables[child.id] == original
    blocks.check()


def test_can_append_slots_counts_copies_exactly() -> None:
    """Of three sharers that all write, two need a copy: with one block free they cannot, with two they can."""
    for num_blocks, fits in ((2, False), (3, True)):
        blocks = BlockManager(block_size=4, num_device_blocks=num_blocks)
        group = make_group(2, n=3)
        leader, *followers = group.sequences
        blocks.allocate(leader)
        for follower in followers:
            blocks.fork(leader, follower, 1)
        assert blocks.can_append_slots([(sequence, 1) for sequence in group.sequences]) is fits


@pytest.mark.parametrize(("num_tokens", "num_shared"), [(7, 1), (8, 1), (9, 2)])
def test_a_group_needs_its_shared_prompt_blocks_once(num_tokens: int, num_shared: int) -> None:
    """The block with the last prompt token is never shared: each follower computes that token itself."""
    blocks = BlockManager(block_size=4, num_device_blocks=100)
    assert blocks.num_blocks_of(make_group(num_tokens, n=3)) == num_shared + 3


def test_a_block_that_is_written_to_leaves_the_cache() -> None:
    """A fork of three tokens inherits a block that was published with four, and writes its own fourth."""
    blocks = BlockManager(block_size=4, num_device_blocks=4, prefix_caching=True)
    parent, child = make_group(4, n=2).sequences
    blocks.allocate(parent)
    parent.num_stored_tokens, child.num_computed_tokens = 4, 3
    blocks.cache.publish(parent, parent.num_stored_tokens)
    (block,) = blocks.tables[parent.id]
    blocks.fork(parent, child, 3)
    blocks.free(parent)
    assert blocks.device.find(parent.block_keys[0]) == block
    assert blocks.append_slots(child, 1) == []
    assert blocks.device.find(parent.block_keys[0]) is None
    blocks.check()


def test_check_notices_a_leaked_block() -> None:
    blocks = BlockManager(block_size=4, num_device_blocks=4)
    blocks.device.allocate()
    with pytest.raises(AssertionError, match="stands in 0 tables"):
        blocks.check()
