"""Chooses the backend that computes the operations of a decoder layer on a device."""

from functools import cache
from importlib import import_module
from typing import cast

import torch

from kernels import reference
from kernels.ops import Ops

EAGER = "eager torch"
_BACKENDS = {"cpu": "kernels.cpu.ops", "cuda": "kernels.triton"}
_INVARIANT = {"cpu": "kernels.cpu.ops", "cuda": "kernels.triton.invariant"}


def backend_name(device: torch.device) -> str:
    """The name of the backend that is chosen for a device, for logs."""
    backend = ops_for(device)
    if backend is reference:
        return EAGER
    return f"compiled for {backend.INSTRUCTION_SET}" if device.type == "cpu" else "triton"  # type: ignore[attr-defined]


@cache
def ops_for(device: torch.device, batch_invariant: bool = False) -> Ops:
    """Returns the fastest backend of a decoder layer's operations that can run on a device.

    batch_invariant: whether the backend should be batch-invariant. The compiled CPU kernels are always batch-invariant,
    and for GPUs there is a batch-invariant backend. Eager torch, the backend of all other devices, is never
    batch-invariant.
    """
    try:
        return cast(Ops, import_module((_INVARIANT if batch_invariant else _BACKENDS)[device.type]))
    except (KeyError, ImportError):
        return cast(Ops, reference)
