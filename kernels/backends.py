"""Chooses the backend of a decoder layer's operations."""

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
    """For logs."""
    backend = ops_for(device)
    if backend is reference:
        return EAGER
    return f"compiled for {backend.INSTRUCTION_SET}" if device.type == "cpu" else "triton"  # type: ignore[attr-defined]


@cache
def ops_for(device: torch.device, batch_invariant: bool = False) -> Ops:
    """The fastest backend for a device. batch_invariant: has an effect on GPUs; the compiled CPU kernels always are,
    and eager torch never is."""
    try:
        return cast(Ops, import_module((_INVARIANT if batch_invariant else _BACKENDS)[device.type]))
    except (KeyError, ImportError):
        return cast(Ops, reference)
