"""Triton kernels on a GPU if there is one, else in Triton's interpreter, which tests/conftest.py chooses."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("there is a GPU driver, but this torch cannot use it", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

if INTERPRETED:
    import_module("triton_interpreter")

DTYPES = [
    pytest.param(torch.float32, id="float32"),
    pytest.param(torch.float16, id="float16"),
    pytest.param(
        torch.bfloat16,
        id="bfloat16",
        marks=pytest.mark.skipif(
            INTERPRETED, reason="Triton's interpreter computes bfloat16 wrongly: it is tested where there is a GPU"
        ),
    ),
]
HALF = [dtype for dtype in DTYPES if dtype.id != "float32"]
FEW_DTYPES = DTYPES[:1] if INTERPRETED else DTYPES
"""For tests whose promise no type changes. To save time, the interpreter has float32 alone, which rounds least."""

quiet_interpreter = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""Deliberate NaN, infinity and overflow: the interpreter's numpy warns of them."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The same numbers on every machine."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@contextmanager
def _strictly() -> Iterator[None]:
    """Uninitialised memory is NaN, and on a GPU a wait of the host is an error."""
    torch.use_deterministic_algorithms(True)  # which also fills what torch.empty returns
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def strict(module: ModuleType) -> SimpleNamespace:
    """A backend's functions under `_strictly`."""

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        with _strictly():
            return function(*arguments)

    return SimpleNamespace(**{name: partial(run, getattr(module, name)) for name in module.__all__})
