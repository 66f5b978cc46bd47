"""Chooses the backend of the sampler's operations."""

from functools import cache
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from kernels.sampling import eager


class SamplingOps(Protocol):
    """Operations of the sampler, defined by `kernels.sampling.eager`."""

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]: ...

    def keep(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None: ...

    def draw(self, logits: Tensor, largest: Tensor, draws: eager.Draws) -> Tensor: ...

    def log_probabilities(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]: ...


_BACKENDS = {"cpu": "kernels.cpu.ops", "cuda": "kernels.triton.sampling"}


@cache
def sampling_ops_for(device: torch.device) -> SamplingOps:
    """The fastest backend for a device."""
    try:
        return cast(SamplingOps, import_module(_BACKENDS[device.type]))
    except (KeyError, ImportError):
        return cast(SamplingOps, eager)
