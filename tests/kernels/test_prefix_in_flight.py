"""Rows attend to keys and values that other rows of the same step store, on every backend."""

from types import ModuleType

import pytest
import torch
from prefix_in_flight import check_prefix_in_flight
from triton_helpers import DEVICE, strict

from kernels import reference, triton

CPU = torch.device("cpu")
CACHES = pytest.mark.parametrize("narrow", [False, True], ids=["wide", "int8"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@CACHES
@DTYPES
def test_on_a_cpu_to_the_bit(kernels: ModuleType, dtype: torch.dtype, narrow: bool) -> None:
    check_prefix_in_flight(kernels, dtype, CPU, narrow=narrow, rtol=0, atol=0)


@CACHES
def test_in_eager_torch(narrow: bool) -> None:
    check_prefix_in_flight(reference, torch.float32, CPU, narrow=narrow)


@CACHES
def test_in_triton(narrow: bool) -> None:
    check_prefix_in_flight(strict(triton), torch.float32, DEVICE, narrow=narrow, rtol=1e-4, atol=1e-4)
