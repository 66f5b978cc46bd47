"""Rows rounded by a Triton kernel, and products of torch's on a GPU.

The interpreter rounds e4m3 towards zero and has no NaN in it: there rows have numbers that e4m3 has exactly.
"""

import pytest
import torch
from test_float8 import exactly, random_weight
from triton_helpers import DEVICE, INTERPRETED, randn, strict

from kernels import float8, triton
from kernels.triton.linear import round_rows as kernel

needs_gpu = pytest.mark.skipif(
    INTERPRETED or torch.cuda.get_device_capability() < (8, 9), reason="it needs a GPU of compute capability 8.9"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (5, 123), (3, 4100), (0, 8)])
def test_rows_of_exact_numbers_are_rounded_to_them(rows: int, columns: int, dtype: torch.dtype) -> None:
    if not INTERPRETED and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no e4m3")
    numbers = (20 * randn(rows, columns)).to(float8.FLOAT8).float()
    numbers[numbers.abs() < 2**-6] = 0
    if rows:
        numbers[:, 1] = -448
        numbers[-1] = 0
    x = (numbers * 2.0**-5).to(dtype)
    found, scales = kernel.round_rows(x)
    expected, expected_scales = float8.round_rows(x)
    assert torch.equal(found.float(), expected.float())
    assert torch.equal(scales, expected_scales)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (5, 123), (257, 4096)])
def test_rows_are_rounded_as_the_reference_rounds_them(rows: int, columns: int, dtype: torch.dtype) -> None:
    x = randn(rows, columns, dtype=dtype)
    x[0, 3] = 1e4
    found, scales = kernel.round_rows(x)
    expected, expected_scales = float8.round_rows(x)
    assert torch.equal(found.view(torch.int8), expected.view(torch.int8))
    assert torch.equal(scales, expected_scales)
    x[-1, 0] = torch.nan
    assert not (kernel.round_rows(x)[0][-1].float() * kernel.round_rows(x)[1][-1]).isfinite().all()


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("input_scale", [None, 0.01])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 128), (5, 48, 256), (300, 512, 1024), (7, 17, 123)])
def test_products_on_a_gpu(
    rows: int, outputs: int, inputs: int, input_scale: float | None, wide: bool, dtype: torch.dtype
) -> None:
    weight = random_weight(outputs, inputs, input_scale=input_scale)
    on_gpu = float8.Float8Weight(*(None if part is None else part.to(DEVICE) for part in weight))
    x, bias = randn(rows, inputs, dtype=dtype, seed=1), randn(outputs, dtype=dtype, seed=2)
    magnitudes = exactly(x.abs().cpu(), weight._replace(numbers=weight.numbers.float().abs().to(float8.FLOAT8)), None)
    for added in (None, bias):
        found = strict(triton).pack_float8(on_gpu, wide)(x, added)
        assert found.dtype is (torch.float32 if wide else dtype)
        tolerance = 1e-4 if found.dtype is torch.float32 else torch.finfo(dtype).eps
        expected = exactly(x.cpu(), weight, None if added is None else added.cpu())
        # Hopper's tensor cores keep about 14 bits of a sum of e4m3 products (DeepSeek-V3's technical report, 2024).
        # Other shapes are multiplied in 16 bits, with sums in float32.
        slack = 1e-3 if outputs % 16 or inputs % 16 else 2**-12 * magnitudes
        assert ((found.cpu().double() - expected).abs() <= tolerance * expected.abs() + slack).all()
