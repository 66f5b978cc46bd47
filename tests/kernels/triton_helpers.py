"""Where Triton kernels are tested: on a GPU where there is one, else in Triton's interpreter, which tests/conftest.py
chooses.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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


def _patch_the_language_once_a_launch() -> None:
    """The interpreter does so for every call of a function within a kernel, which takes a third of its time."""
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules = (triton.language, triton.language.core)
    patched: set[str] = set()

    def patch_once(function: Callable[..., Any]) -> Any:
        seen = function.__globals__.values()
        wanted = {module.__name__ for module in modules if any(value is module for value in seen)}
        if wanted <= patched:
            return interpreter._LangPatchScope()
        patched.update(wanted)
        return patch(function)

    def launch_anew(*arguments: Any, **options: Any) -> None:
        patched.clear()
        launch(*arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


def _make_types_once() -> None:
    """The interpreter makes the type of every value anew, and a table of numpy's with it: a quarter of its time."""
    from triton.runtime import interpreter

    block_type = triton.language.block_type
    make, of_numpy = block_type.__init__, interpreter._get_np_dtype
    made: dict[Any, dict[str, Any]] = {}
    of_names: dict[str, Any] = {}

    def make_once(self: Any, element_type: Any, shape: Any) -> None:
        key = element_type.name, tuple(getattr(size, "value", size) for size in shape)
        if key not in made:
            make(self, element_type, shape)
            made[key] = dict(vars(self))
        vars(self).update(made[key])

    def find_once(of: Any) -> Any:
        if (found := of_names.get(of.name)) is None:
            found = of_names[of.name] = of_numpy(of)
        return found

    block_type.__init__, interpreter._get_np_dtype = make_once, find_once


if INTERPRETED:
    _patch_the_language_once_a_launch()
    _make_types_once()

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

quiet_interpreter = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""For NaN, infinity and overflow that are meant: numpy, which the interpreter computes with, warns of them."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The same numbers on every machine."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@contextmanager
def _strictly() -> Iterator[None]:
    """Memory that is not initialised is NaN, and on a GPU it is an error where the host would wait for the device."""
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
    """A backend's functions, which see NaN where memory is not initialised and may not wait for a GPU."""

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        with _strictly():
            return function(*arguments)

    return SimpleNamespace(**{name: partial(run, getattr(module, name)) for name in module.__all__})
