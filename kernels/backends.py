"""Chooses the backend that computes the operations of a decoder layer, by device."""

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
    """The backend of a device, in words for a log."""
    backend = ops_for(device)
    if backend is reference:
        return EAGER
    return f"compiled for {backend.INSTRUCTION_SET}" if device.type == "cpu" else "triton"  # type: ignore[attr-defined]


@cache
def ops_for(device: torch.device, batch_invariant: bool = False) -> Ops:
    """The fastest backend that can run on a device.

    batch_invariant: only backends whose row sums are bit-identical for any other rows. The compiled CPU kernels always
    are. Eager torch, which runs where there is no other backend, does not promise it.
    """
    try:
        return cast(Ops, import_module((_INVARIANT if batch_invariant else _BACKENDS)[device.type]))
    except (KeyError, ImportError):
        return cast(Ops, reference)
