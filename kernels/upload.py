"""Copies numbers to a device, without waiting for the device's current work."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(
    numbers: Sequence[float] | Sequence[Sequence[float]] | Any, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Copy numbers to a device. numbers: lists, a tensor on the host, or a numpy array. Returns a tensor on the device.

    For a GPU, numbers are copied from pinned memory. Without pinned memory, the host would wait until the GPU has done
    its current work.
    """
    tensor = torch.as_tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
