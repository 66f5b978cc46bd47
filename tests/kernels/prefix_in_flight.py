"""A prefix that one sequence computes in a step, and that other rows of the step attend to, in every backend."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels.attention import narrow_cache
from kernels.inputs import AttentionMetadata, rotary_tables

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 4, 2, 32


def check_prefix_in_flight(
    ops: ModuleType, dtype: torch.dtype, device: torch.device, *, narrow: bool, **tolerance: Any
) -> None:
    """Three sequences share two blocks that the second fills. All rows in one call, readers before the writer, must
    equal separate calls; slots without keys and values are NaN.
    """
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(14, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, generator=generator).to(device, dtype)
    positions = torch.tensor([8, 9, *range(9), 8, 9, 10])
    rotation = tuple(t.to(device) for t in rotary_tables(positions, 100.0 ** -torch.linspace(0, 1, 16), 1.0))
    tables = torch.tensor([[5, 1, 2], [5, 1, 3], [5, 1, 4]])
    rows = [range(2), range(2, 11), range(11, 14)]
    slots = torch.cat([_slots(table, positions[list(of)]) for table, of in zip(tables, rows, strict=True)]).to(device)
    empty = torch.full((7, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype)

    def attend(cache: Tensor, numbers: list[int]) -> list[Tensor]:
        taken = torch.tensor([row for number in numbers for row in rows[number]], device=device)
        metadata = AttentionMetadata.build(
            [len(rows[number]) for number in numbers],
            [int(positions[rows[number][-1]]) + 1 for number in numbers],
            tables[numbers],
            device,
        )
        turned = tuple(t[taken] for t in rotation)
        arguments = (None, 1e-5, 0.0, turned, cache, slots[taken], metadata, 0.2)
        found = ops.qkv_attention(qkv[taken].clone(), *arguments)
        return list(found.split([len(rows[number]) for number in numbers]))

    def cache() -> Tensor:
        return (narrow_cache.narrowed(empty) if narrow else empty.clone()).to(device)

    together = attend(cache(), [0, 1, 2])
    in_turn = cache()
    one_by_one = {number: attend(in_turn, [number])[0] for number in (1, 0, 2)}
    for number, found in enumerate(together):
        assert found.isfinite().all()
        torch.testing.assert_close(found, one_by_one[number], **tolerance)


def _slots(table: Tensor, positions: Tensor) -> Tensor:
    return table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
