"""Copies numbers to a device, without waiting for the device's current work."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(
    numbers: Sequence[float] | Sequence[Sequence[float]] | Any, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns a tensor on the device, from anything that can become a host tensor: lists, a tensor, a numpy array.

    Only a copy from pinned memory lets the host continue while a GPU still computes.
    """
    tensor = torch.as_tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
