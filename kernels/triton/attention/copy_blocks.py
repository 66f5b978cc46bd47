"""Copies whole blocks within the KV cache in one pass; a destination may be another pair's source.

    `cache`                   [num_blocks, ...], contiguous.
    `sources, destinations`   [n] int64.
    `program`                 A few columns of all n pairs: [n padded, columns].

A barrier separates a program's loads from its stores, and columns are independent. Eager torch would move every byte
twice. The oracle, `kernels.reference.copy_blocks`, copies if there are too many pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference
from kernels.triton.launch import OPTIONS

_TILE = 8192
"""Elements of a program, 64 per thread."""
_MAX_PAIRS = 256
"""Pairs of a program. With more, it would read less than 64 contiguous bytes of a block in half precision."""


def copy_blocks(cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    num_pairs = len(sources)
    if num_pairs > _MAX_PAIRS:
        reference.copy_blocks(cache, sources, destinations)
    elif num_pairs:
        blocks = (cache if cache.dtype.itemsize > 1 else cache.view(torch.int8)).view(len(cache), -1)
        pairs = triton.next_power_of_2(num_pairs)
        columns = min(_TILE // pairs, 2048)
        _copy_blocks_kernel[(triton.cdiv(blocks.shape[1], columns),)](
            blocks,
            sources,
            destinations,
            num_pairs,
            blocks.shape[1],
            pairs=pairs,
            columns=columns,
            num_warps=4,
            **OPTIONS,
        )


@triton.jit(do_not_specialize=["num_pairs"])
def _copy_blocks_kernel(cache, sources, destinations, num_pairs, width, pairs: tl.constexpr, columns: tl.constexpr):
    pair = tl.arange(0, pairs)
    source = tl.load(sources + pair, mask=pair < num_pairs, other=0)[:, None]
    destination = tl.load(destinations + pair, mask=pair < num_pairs, other=0)[:, None]
    column = (tl.program_id(0) * columns + tl.arange(0, columns))[None, :]
    inside = (pair < num_pairs)[:, None] & (column < width)
    moved = tl.load(cache + source * width + column, mask=inside)
    tl.debug_barrier()
    tl.store(cache + destination * width + column, moved, mask=inside)
