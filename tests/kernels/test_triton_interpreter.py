"""Products in the interpreter have the same bits on every processor, so that equality to the bit tests our kernels."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton_helpers import INTERPRETED, randn

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels run on the GPU that is here")


@triton.jit
def _product_kernel(x, y, start, result, rows: tl.constexpr, inner: tl.constexpr, columns: tl.constexpr):
    row, place, column = tl.arange(0, rows), tl.arange(0, inner), tl.arange(0, columns)
    left = tl.load(x + row[:, None] * inner + place[None, :])
    right = tl.load(y + place[:, None] * columns + column[None, :])
    at = row[:, None] * columns + column[None, :]
    tl.store(result + at, tl.dot(left, right, tl.load(start + at), input_precision="ieee"))


def multiply(x: Tensor, y: Tensor, start: Tensor) -> Tensor:
    result = torch.empty_like(start)
    _product_kernel[(1,)](x.contiguous(), y, start.contiguous(), result, *x.shape, y.shape[1])
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_has_the_bits_of_a_sum_in_the_order_of_the_inner_axis_wherever_it_lies(dtype: torch.dtype) -> None:
    x, y, start = randn(64, 32, dtype=dtype), randn(32, 64, dtype=dtype, seed=1), randn(64, 64, seed=2)
    expected = torch.zeros(64, 64)
    for column, row in zip(x.float().T, y.float(), strict=True):
        expected += column[:, None] * row
    expected += start
    for rows in (1, 2, 4, 8, 16, 32, 64):
        for first in range(0, 64, max(rows, 7)):
            places = slice(first, first + rows)
            if len(x[places]) == rows:
                assert torch.equal(multiply(x[places], y, start[places]), expected[places]), places
