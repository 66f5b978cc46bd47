"""Copies numbers from host memory to a device, without waiting until the device has done its current work."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(
    numbers: Sequence[float] | Sequence[Sequence[float]] | Any, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Copy numbers from host memory to a device. numbers: lists, a tensor on the host, or a numpy array. Returns a
    tensor on the device.

    For a GPU, the numbers are first put into pinned host memory. From memory that is not pinned, the copy would make
    the host wait until the GPU has done its current work.
    """
    tensor = torch.as_tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
