"""Tests of kernels, which also run on a GPU machine with only torch, triton and pytest."""

import importlib
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cpu_libraries import load_cpu_library, tested_sets

from kernels.cpu import library

_NEEDS_HYPOTHESIS = [] if find_spec("hypothesis") else [
    path.name for path in Path(__file__).parent.glob("test_*.py") if "from hypothesis" in path.read_text()
]  # fmt: skip
collect_ignore = _NEEDS_HYPOTHESIS


def pytest_report_header() -> list[str]:
    return [f"left out, because hypothesis is not installed: {', '.join(_NEEDS_HYPOTHESIS)}"] * bool(_NEEDS_HYPOTHESIS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-kernels",
        action="store_true",
        help="test the CPU kernels of every instruction set, not of two alone, and compile Triton's for two GPUs",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run CPU kernels' tests for this machine's best and simplest instruction sets, or for all."""
    if "cpu_library" in metafunc.fixturenames:
        names = (
            list(library.INSTRUCTION_SETS)
            if metafunc.config.getoption("--all-kernels", default=False)
            else tested_sets()
        )
        metafunc.parametrize("cpu_library", names, indirect=True)


@pytest.fixture
def cpu_library(request: pytest.FixtureRequest) -> ModuleType:
    """A library compiled for one instruction set."""
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
