"""The tests of kernels also run alone on a GPU machine that has torch, triton and pytest, and nothing else of ours."""

import importlib
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cpu_libraries import load_cpu_library

from kernels.cpu import library

_NEEDS_HYPOTHESIS = [] if find_spec("hypothesis") else [
    path.name for path in Path(__file__).parent.glob("test_*.py") if "from hypothesis" in path.read_text()
]  # fmt: skip
collect_ignore = _NEEDS_HYPOTHESIS


def pytest_report_header() -> list[str]:
    return [f"left out, because hypothesis is not installed: {', '.join(_NEEDS_HYPOTHESIS)}"] * bool(_NEEDS_HYPOTHESIS)


@pytest.fixture(params=library.INSTRUCTION_SETS)
def cpu_library(request: pytest.FixtureRequest) -> ModuleType:
    """Compiled for one instruction set, each in turn."""
    return load_cpu_library(request.param)


@pytest.fixture
def kernels(cpu_library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The CPU's backend with that library."""
    backend = importlib.import_module("kernels.cpu.ops")
    monkeypatch.setattr(backend, "_library", cpu_library)
    return backend


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
