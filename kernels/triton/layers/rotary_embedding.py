"""Rotates each pair (x[i], x[i + half]) of every head by its angle for the token, in place.

    `x`          [num_tokens, num_heads, head_dim], with any stride between tokens.
    `cos, sin`   [num_tokens, half] float32, contiguous. Only the first 2 * half elements of a head are rotated.
    `tile`       [heads, half padded to a power of two] of one token. Both halves are loaded before either is stored.

Oracle: `kernels.reference.rotary_embedding`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import OPTIONS, num_warps

_TILE = 2048
"""Pairs of a program, such as 32 heads of 128."""


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    num_tokens, num_heads, _ = x.shape
    half = cos.shape[1]
    if num_tokens == 0:
        return
    columns = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(num_heads), max(1, _TILE // columns))
    _rotary_embedding_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        x,
        cos,
        sin,
        x.stride(0),
        x.stride(1),
        num_heads,
        half=half,
        heads=heads,
        columns=columns,
        num_warps=num_warps(2 * heads * columns),
        **OPTIONS,
    )


@triton.jit(do_not_specialize=["num_heads"])
def _rotary_embedding_kernel(
    x,
    cos,
    sin,
    token_stride,
    head_stride,
    num_heads,
    half: tl.constexpr,
    heads: tl.constexpr,
    columns: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)[:, None]
    column = tl.arange(0, columns)[None, :]
    inside = (head < num_heads) & (column < half)
    cosine = tl.load(cos + token * half + column, mask=column < half, other=0.0)
    sine = tl.load(sin + token * half + column, mask=column < half, other=0.0)
    places = x + token * token_stride + head * head_stride + column
    first = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(places + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, (first * cosine - second * sine).to(x.dtype.element_ty), mask=inside)
    tl.store(places + half, (second * cosine + first * sine).to(x.dtype.element_ty), mask=inside)
