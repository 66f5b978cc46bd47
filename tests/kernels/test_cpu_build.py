"""A machine that cannot compile the CPU kernels gets one line about it, and eager torch."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from kernels import ops, reference, sampling, sampling_ops
from kernels.cpu import library

CPU = torch.device("cpu")


@pytest.fixture
def _without_libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nothing had been built."""
    ops.ops_for.cache_clear()
    sampling_ops.sampling_ops_for.cache_clear()
    monkeypatch.setattr(library, "library_path", lambda name: library.FOLDER / f"{name}-that-is-not-there.so")
    for name in ("kernels.cpu.ops", "kernels.cpu.sampling"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    ops.ops_for.cache_clear()
    sampling_ops.sampling_ops_for.cache_clear()


@pytest.mark.usefixtures("_without_libraries")
def test_without_a_library_eager_torch_computes() -> None:
    assert ops.ops_for(CPU) is reference
    assert sampling_ops.sampling_ops_for(CPU) is sampling
    assert ops.backend_name(CPU) == ops.EAGER


def test_without_a_compiler_one_line_says_so_and_what_was_built_stays() -> None:
    before = sorted(library.FOLDER.glob("*")) if library.FOLDER.exists() else []
    build = subprocess.run(
        [sys.executable, "-m", "kernels.cpu.build"],
        env=os.environ | {"CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    (line,) = build.stderr.splitlines()
    assert line.startswith("There is no C++ compiler (no-such-compiler)")
    assert (sorted(library.FOLDER.glob("*")) if library.FOLDER.exists() else []) == before
