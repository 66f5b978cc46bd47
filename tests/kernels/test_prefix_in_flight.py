"""Rows attend to keys and values that other rows of the same step store, on the CPU and in eager torch."""

from types import ModuleType

import pytest
import torch
from prefix_in_flight import check_prefix_in_flight

from kernels import reference

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
