"""Chooses, by device, who computes the operations of a sampler, as `kernels.ops` does for those of a decoder layer."""

from types import ModuleType
from typing import Protocol, cast

import torch
from torch import Tensor

from kernels import sampling


class SamplingOps(Protocol):
    """What a backend offers; `kernels.sampling` says what each operation is."""

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]: ...

    def draw(self, logits: Tensor, largest: Tensor, draws: sampling.Draws) -> Tensor: ...

    def log_probabilities(self, logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]: ...


_BACKENDS: dict[str, ModuleType] = {}


def sampling_ops_for(device: torch.device) -> SamplingOps:
    """The fastest backend that can run on a device."""
    return cast(SamplingOps, _BACKENDS.get(device.type, sampling))
