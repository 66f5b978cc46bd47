"""Chooses the backend for the operations of a decoder layer, by device."""

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
    """The name of a device's backend, for logs."""
    backend = ops_for(device)
    if backend is reference:
        return EAGER
    return f"compiled for {backend.INSTRUCTION_SET}" if device.type == "cpu" else "triton"  # type: ignore[attr-defined]


@cache
def ops_for(device: torch.device, batch_invariant: bool = False) -> Ops:
    """The fastest backend that can run on a device.

    batch_invariant: whether to choose a batch-invariant backend, if one exists. The compiled CPU kernels are always
    batch-invariant. Eager torch, the backend of all other devices, is not batch-invariant.
    """
    try:
        return cast(Ops, import_module((_INVARIANT if batch_invariant else _BACKENDS)[device.type]))
    except (KeyError, ImportError):
        return cast(Ops, reference)
