"""Numbers onto a device, without waiting for what it is doing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(
    numbers: Sequence[float] | Sequence[Sequence[float]] | Any, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor on the device, from anything that makes a tensor in host memory: lists, a tensor, a numpy array.

    Only a copy from pinned memory leaves the host free while a GPU still computes.
    """
    tensor = torch.as_tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
