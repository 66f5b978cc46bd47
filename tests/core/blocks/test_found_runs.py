"""Runs that are remembered are those that are there."""

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.blocks.allocator import BlockAllocator
from scheduler_service.core.blocks.found_runs import FoundRuns

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=4)
STEPS = st.lists(st.tuples(st.sampled_from(["look", "look", "look", "publish", "withdraw"]), st.integers(0, 99)))


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
