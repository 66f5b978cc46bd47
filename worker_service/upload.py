"""Lists of numbers onto a device, without waiting for what it is doing."""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(
    numbers: Sequence[float] | Sequence[Sequence[float]] | npt.NDArray[Any] | Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A tensor on the device. Only a copy from pinned memory leaves the host free while a GPU still computes."""
    tensor = torch.as_tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
