"""Products that sum up a row the same whatever the number of rows."""

import pytest
import torch
from triton_helpers import DTYPES, randn, strict

from kernels.triton import invariant

ops = strict(invariant)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (40, 123), (33, 192)])
@pytest.mark.parametrize("rows", [0, 1, 70])
def test_products_are_those_of_torch(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype, seed=1)
    for bias in (None, randn(outputs, dtype=dtype, seed=2)):
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        found = ops.pack(weight)(x, bias)
        assert found.dtype is dtype
        torch.testing.assert_close(found, expected.to(dtype), atol=1e-3, rtol=1e-3)
        wide = ops.pack(weight, True)(x, bias)
        torch.testing.assert_close(wide, expected.float(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_a_row_is_summed_up_the_same_alone_and_among_any_number(dtype: torch.dtype, wide: bool) -> None:
    """Numbers of rows that have all sizes of tiles."""
    x, weight, bias = randn(530, 328, dtype=dtype), randn(70, 328, dtype=dtype, seed=1), randn(70, dtype=dtype, seed=2)
    product = ops.pack(weight, wide)
    together = product(x, bias)
    for first, last in [(0, 1), (63, 64), (64, 65), (529, 530), (0, 3), (100, 164), (100, 165), (5, 517)]:
        assert torch.equal(product(x[first:last], bias), together[first:last]), (first, last)
