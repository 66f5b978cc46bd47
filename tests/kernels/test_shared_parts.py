"""Decodes behind one prompt attend to it together, with the bits that each has alone where these are promised."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from attention_cases import Case, make_case
from attention_cases import ops as fastest
from triton_helpers import DEVICE, FEW_DTYPES, strict

from kernels.inputs import SharedParts
from kernels.triton import invariant, shared_tokens

ops = strict(invariant)
module = import_module("kernels.triton.attention.attention_by_position")
CONTEXTS = [1030, 700, 1500, 513, 1025, 1024, 40, 530, 1600]
"""Of rows whose first parts, up to two, are the same blocks; but rows 3 and 7 share another, and row 6 has none."""


def shared_case(dtype: torch.dtype, groups: int) -> Case:
    """Rows share as many parts as `shared_with` says, by copies of their tables; queries differ."""
    kv_heads = 2 if groups == 3 else 1
    case = make_case([(1, context - 1) for context in CONTEXTS], kv_heads=kv_heads, groups=groups, dtype=dtype,
                     attend=ops.paged_attention)  # fmt: skip
    tables = case.metadata.block_tables
    for row, context in enumerate(CONTEXTS):
        first, blocks = (3 if row in (3, 7) else 2), min(2, (context - 1) // 512) * 32
        tables[row, :blocks] = tables[first, :blocks]
    return case


def together(case: Case, items: list[tuple[int, list[int]]]) -> Case:
    """items: a part, and the rows that attend to it together; the last item is not used."""
    rows = [row for _, members in items for row in members]
    starts = [sum(len(members) for _, members in items[:number]) for number in range(len(items))]
    table = [(part, start, len(members)) for (part, members), start in zip(items, starts, strict=True)]
    counts = [max((part + 1 for part, members in items if row in members), default=0) for row in range(len(CONTEXTS))]
    shared = SharedParts(
        torch.tensor([*table, (7, 99, 0)], dtype=torch.int32, device=DEVICE),
        torch.tensor(rows, dtype=torch.int32, device=DEVICE),
        torch.tensor(counts, dtype=torch.int32, device=DEVICE),
        max(counts),
    )
    return replace(case, metadata=replace(case.metadata, shared=shared))


ITEMS = [(0, [0, 1, 2]), (0, [4, 5, 8]), (0, [3, 7]), (1, [0, 2, 4]), (1, [8])]


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize(("groups", "soft_cap"), [(3, None), (16, 2.0)])
def test_shared_parts_give_the_bits_that_each_row_has_alone(
    groups: int, soft_cap: float | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a row's own parts are then merged by one program or by several."""
    assert shared_tokens(groups, 16, dtype) >= (1 if dtype is torch.float32 else 3)
    case = shared_case(dtype, groups)
    most = shared_tokens(groups, 16, dtype)
    items = [(part, rows[start : start + most]) for part, rows in ITEMS for start in range(0, len(rows), most)]
    expected = case.run(soft_cap=soft_cap)
    for processors in (1, 1000):
        monkeypatch.setattr(module, "num_processors", lambda _, processors=processors: processors)
        assert torch.equal(together(case, items).run(soft_cap=soft_cap), expected)


def test_a_shared_part_is_read_for_all_rows_from_the_first_ones_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = shared_case(torch.float32, 3)
    expected = case.run()
    for processors in (1, 1000):
        monkeypatch.setattr(module, "num_processors", lambda _, processors=processors: processors)
        sharing = together(case, ITEMS)
        tables = case.metadata.block_tables.clone()
        for row, count in enumerate(sharing.metadata.shared.num_parts.tolist()):  # type: ignore[union-attr]
            if row not in (0, 3, 4, 8):
                tables[row, : count * 32] = len(case.layer_cache) + 99
        sharing = replace(sharing, metadata=replace(sharing.metadata, block_tables=tables))
        assert torch.equal(sharing.run(), expected)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_the_fastest_kernels_attend_together_too(dtype: torch.dtype) -> None:
    case = replace(together(shared_case(dtype, 3), ITEMS), attend=fastest.paged_attention)
    case.check()
    case.check(soft_cap=2.0)
    case.check(window=100)
