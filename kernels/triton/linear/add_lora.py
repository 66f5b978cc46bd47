"""Adds LoRA adapters, one for each row, to a linear layer's output: a kernel for inner units, and one for outputs.

    `x`      [rows, inputs], with any stride between rows.
    `a, b`   [slots, parts, max_rank, inputs] and [slots, max_rank, outputs].
    `inner`  [rows, parts, max_rank] float32, the result of the first kernel.
    `y`      [rows, outputs], which is changed in place.

Sums are in order, so batch-invariant. A CUDA graph may be replayed with other adapters in the slots. Weights are read
for each row, often from the GPU's cache, even for rows of one prompt. Oracle: `kernels.reference.add_lora`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import LoraWeights
from kernels.triton.launch import OPTIONS

_INPUTS = 128
_OUTPUTS = 256
_MAX_PARTS = 3


def add_lora(y: Tensor, x: Tensor, slots: Tensor, weights: LoraWeights) -> None:
    """Supports up to three fused projections."""
    _, parts, max_rank, inputs = weights.a.shape
    if parts > _MAX_PARTS:
        raise ValueError(f"there are {parts} fused projections; at most {_MAX_PARTS} are supported")
    if not len(x):
        return
    outputs = y.shape[1]
    inner = torch.empty((len(x), parts, max_rank), dtype=torch.float32, device=x.device)
    ranks = triton.next_power_of_2(max_rank)
    _shrink_kernel[(len(x), parts)](
        x, weights.a, slots, weights.ranks, inner, x.stride(0), inputs, max_rank,
        ranks=ranks, tile=max(16, _INPUTS * 16 // max(16, ranks)), num_warps=4, **OPTIONS,
    )  # fmt: skip
    second, third = [*weights.starts[1:-1], outputs, outputs][:2]
    _expand_kernel[(len(x), triton.cdiv(outputs, _OUTPUTS))](
        inner, weights.b, slots, weights.ranks, y, outputs, max_rank, second, third,
        parts=parts, tile=_OUTPUTS, num_warps=4, **OPTIONS,
    )  # fmt: skip


@triton.jit
def _shrink_kernel(x, a, slots, slot_ranks, inner, x_stride, inputs, max_rank, ranks: tl.constexpr, tile: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    rank = tl.load(slot_ranks + slot)
    unit = tl.arange(0, ranks)
    a += (slot * tl.num_programs(1) + part) * max_rank * inputs
    sums = tl.zeros((ranks,), dtype=tl.float32)
    for first in range(0, inputs, tile):
        place = first + tl.arange(0, tile)
        values = tl.load(x + row * x_stride + place, mask=place < inputs, other=0.0).to(tl.float32)
        inside = (unit < rank)[:, None] & (place < inputs)[None, :]
        factors = tl.load(a + unit[:, None] * inputs + place[None, :], mask=inside, other=0.0).to(tl.float32)
        sums += tl.sum(factors * values[None, :], axis=1)
    tl.store(inner + (row * tl.num_programs(1) + part) * max_rank + unit, sums, mask=unit < rank)


@triton.jit
def _expand_kernel(
    inner, b, slots, slot_ranks, y, outputs, max_rank, second, third, parts: tl.constexpr, tile: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    rank = tl.load(slot_ranks + slot)
    if rank == 0:
        return
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = column < outputs
    part = (column >= second).to(tl.int32) + (column >= third).to(tl.int32)
    part = tl.minimum(part, parts - 1)
    added = tl.zeros((tile,), dtype=tl.float32)
    for unit in range(rank):
        value = tl.load(inner + (row * parts + part) * max_rank + unit, mask=inside, other=0.0)
        factor = tl.load(b + (slot * max_rank + unit) * outputs + column, mask=inside, other=0.0).to(tl.float32)
        added += value * factor
    place = y + row * outputs + column
    before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (before + added).to(y.dtype.element_ty), mask=inside)
