"""Chooses the backend that computes the sampler's operations on a device. (`kernels.backends` chooses the backend for
the operations of a decoder layer.)"""

from functools import cache
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from kernels.sampling import eager


class SamplingOps(Protocol):
    """The operations of the sampler, which each backend implements. The docstrings of `kernels.sampling.eager` define
    the operations."""

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]: ...

    def keep(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None: ...

    def draw(self, logits: Tensor, largest: Tensor, draws: eager.Draws) -> Tensor: ...

    def log_probabilities(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]: ...


_BACKENDS = {"cpu": "kernels.cpu.sampling", "cuda": "kernels.triton.sampling"}


@cache
def sampling_ops_for(device: torch.device) -> SamplingOps:
    """Returns the fastest backend of the sampler's operations that can run on a device."""
    try:
        return cast(SamplingOps, import_module(_BACKENDS[device.type]))
    except (KeyError, ImportError):
        return cast(SamplingOps, eager)
