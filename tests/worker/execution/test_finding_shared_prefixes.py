"""Rows of a decode that begin with the same blocks are found, and computed together they say what each says alone."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from fake_decode_graphs import FakeGraphs
from hypothesis import given
from hypothesis import strategies as st
from stepped_worker import PROMPT, SteppedWorker, load_runner
from worker_helpers import LIMITS, new_sequence, tokens

from worker_service.execution.cache import shared_prefixes
from worker_service.execution.cache.shared_prefixes import SharedInputs, find_shared
from worker_service.execution.steps import decode_graphs
from worker_service.execution.steps.decode_graphs import DecodeGraphs
from worker_service.execution.steps.model_runner import ModelRunner

BLOCK, PART = 16, 512
CPU = torch.device("cpu")
tables = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 4 * PART))
"""Which prompt a row begins with, how many of its parts, and how many tokens the row has."""


@given(st.lists(tables, max_size=12), st.integers(1, 5), st.integers(0, 20), st.integers(1, 4))
def test_items_hold_rows_with_the_same_whole_parts(
    rows: list[tuple[int, int, int]], most_rows: int, most_items: int, most_parts: int
) -> None:
    num_blocks = 4 * PART // BLOCK
    blocks = [
        [*range(prompt * 1000, prompt * 1000 + parts * PART // BLOCK), *range(10_000 + 1000 * row, 20_000 + 1000 * row)]
        for row, (prompt, parts, _) in enumerate(rows)
    ]
    tables_of_rows = [tokens(table[:num_blocks]) for table in blocks]
    contexts = [context for _, _, context in rows]
    found = find_shared(
        tables_of_rows, contexts, BLOCK, most_rows=most_rows, most_items=most_items, most_parts=most_parts
    )
    assert len(found.items) <= most_items
    parts_of: list[list[int]] = [[] for _ in rows]
    for part, first, count in found.items:
        assert 1 <= count <= most_rows
        members = found.rows[first : first + count]
        for row in members:
            parts_of[row].append(part)
            assert contexts[row] > (part + 1) * PART
            end = (part + 1) * PART // BLOCK
            assert tables_of_rows[row][:end] == tables_of_rows[members[0]][:end]
    assert parts_of == [list(range(count)) for count in found.num_parts]
    if most_items == 20 and most_rows > 2:
        alone = [min(parts, (context - 1) // PART, most_parts) for (_, parts, context) in rows]
        for row, (prompt, _, _) in enumerate(rows):
            with_others = max((alone[other] for other in range(len(rows))
                               if other != row and rows[other][0] == prompt), default=0)  # fmt: skip
            assert found.num_parts[row] == min(alone[row], with_others) or len(found.items) > 15


def test_blocks_that_a_part_ends_within_must_be_the_same_too() -> None:
    whole, other = tokens(range(200)), tokens([*range(170), 999, *range(171, 200)])
    options = {"most_rows": 16, "most_items": 9, "most_parts": 3}
    assert find_shared([whole, other], [520, 520], 3, **options).num_parts == [0, 0], "token 511 is in block 170"
    assert find_shared([whole, tokens([*range(171), *range(900, 930)])], [520, 520], 3, **options).num_parts == [1, 1]


def test_what_saves_little_is_not_taken() -> None:
    def fill(num_rows: int, size: int) -> bool:
        inputs = SharedInputs(16, 16, 4, room=64, least_saved=3 * 4 * PART, block_size=BLOCK, device=CPU)
        filled = inputs.fill([tokens(range(130))] * num_rows, [4 * PART + 1] * num_rows, size)
        if filled:
            shared = inputs.tensors(size)
            assert shared.items.tolist()[:5] == [[part, part * num_rows, num_rows] for part in range(4)] + [[0, 0, 0]]
            assert shared.num_parts.tolist() == [4] * num_rows + [0] * (size - num_rows)
            assert shared.rows.tolist()[: 2 * num_rows] == [*range(num_rows)] * 2
        return filled

    assert not fill(3, 4)
    assert fill(4, 8)


def test_few_rows_have_room_for_more_parts_each() -> None:
    inputs = SharedInputs(256, 16, 50, room=512, least_saved=1, block_size=BLOCK, device=CPU)
    assert [inputs.most_parts(size) for size in (8, 16, 32, 256, 512)] == [32, 32, 16, 2, 1]
    assert inputs.tensors(32).most_parts == 16
    tables, contexts = [tokens(range(5000))] * 32, [40 * PART] * 32
    found = inputs.find(tables, contexts, 32)
    assert found is not None
    assert found.num_parts == [16] * 32


@pytest.fixture
def small_parts(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of GPUs compute, and parts are of 16 keys."""
    attention = import_module("kernels.triton.attention.attention_by_position")
    monkeypatch.setattr(attention, "_MAX_TILE_KEYS", 16)
    for module in (shared_prefixes, decode_graphs, attention):
        monkeypatch.setattr(module, "PART_KEYS", 16)
    monkeypatch.setattr(decode_graphs, "_MIN_SAVED", 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of GPUs are interpreted where there is none")
def test_sequences_behind_one_prompt_say_from_graphs_what_they_say_launched_one_by_one(
    make_checkpoint: Callable[..., Path], small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight of them, with the bits that each has where these are promised."""
    runner = load_runner(make_checkpoint(num_hidden_layers=1), batch_invariant=True)
    graphs = DecodeGraphs(runner.model, runner.cache_engine.device_blocks, 8, LIMITS.max_model_len, record=FakeGraphs())
    logits: list[torch.Tensor] = []
    compute = runner.model.compute_logits
    monkeypatch.setattr(runner.model, "compute_logits", lambda hidden: logits.append(compute(hidden)) or logits[-1])
    taken = []
    fill = SharedInputs.fill
    monkeypatch.setattr(SharedInputs, "fill", lambda *args: taken.append(fill(*args)) or taken[-1])
    found = []
    for one in (runner, ModelRunner(runner.model, runner.cache_engine, graphs)):
        logits.clear()
        worker = SteppedWorker(one)
        prompts = [[*PROMPT[:32], number, number + 1] for number in range(8)]
        new = tuple(new_sequence(number, prompt, [*range(8), 10 + 2 * number, 11 + 2 * number])
                    for number, prompt in enumerate(prompts))  # fmt: skip
        worker.step(*((number, 34, True) for number in range(8)), new_sequences=new)
        for _ in range(2):
            worker.step(*((number, 1, True) for number in range(8)))
        found.append(torch.cat(logits))
    assert torch.equal(*found)
    assert taken == [True, True]
