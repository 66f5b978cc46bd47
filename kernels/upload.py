"""Copies numbers from host memory to a device, without waiting for its current work."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(
    numbers: Sequence[float] | Sequence[Sequence[float]] | Any, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """numbers: lists, a tensor on the host, or a numpy array. A GPU copies from pinned memory; from other memory, the
    host would wait for the GPU's current work."""
    tensor = torch.as_tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
