"""A machine that cannot compile the CPU kernels gets one line about it, and eager torch."""

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import backends, reference, sampling, sampling_ops
from kernels.cpu import build, library

CPU = torch.device("cpu")


@pytest.fixture
def _without_libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nothing had been built."""
    backends.ops_for.cache_clear()
    sampling_ops.sampling_ops_for.cache_clear()
    monkeypatch.setattr(library, "library_path", lambda name: library.FOLDER / f"{name}-that-is-not-there.so")
    for name in ("kernels.cpu.ops", "kernels.cpu.sampling"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    backends.ops_for.cache_clear()
    sampling_ops.sampling_ops_for.cache_clear()


@pytest.mark.usefixtures("_without_libraries")
def test_without_a_library_eager_torch_computes() -> None:
    assert backends.ops_for(CPU) is reference
    assert sampling_ops.sampling_ops_for(CPU) is sampling
    assert backends.backend_name(CPU) == backends.EAGER


@pytest.fixture
def _other_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As if a source had changed after the build."""
    built = tmp_path / "lib"
    built.mkdir()
    monkeypatch.setattr(library, "FOLDER", built)
    for name in library.INSTRUCTION_SETS:
        library.library_path(name).write_bytes(b"not of these sources")
    sources = shutil.copytree(library.SOURCES, tmp_path / "csrc")
    source = sources / "layer.h"
    source.write_text(source.read_text() + "// a change\n")
    monkeypatch.setattr(library, "SOURCES", sources)
    backends.ops_for.cache_clear()
    monkeypatch.delitem(sys.modules, "kernels.cpu.ops", raising=False)
    yield
    backends.ops_for.cache_clear()


@pytest.mark.usefixtures("_other_sources")
def test_libraries_of_other_sources_are_not_loaded_and_it_is_said_what_to_run() -> None:
    assert backends.ops_for(CPU) is reference
    with pytest.raises(ImportError, match=r"\(there are only others\): run python -m kernels\.cpu\.build"):
        importlib.import_module("kernels.cpu.ops")


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", ("avx2", "fma3", "f16c"), ["avx2"]),
        ("x86_64", ("avx2", "fma3", "f16c", "avx_vnni"), ["avx2_vnni", "avx2"]),
        ("x86_64", ("neon", "dot"), []),
        ("aarch64", ("neon", "dot"), ["neon_dotprod", "neon"]),
        ("arm64", ("neon", "dot", "bf16", "i8mm", "sve"), ["neon_dotprod", "neon"]),
        ("aarch64", ("neon",), ["neon"]),
        ("riscv64", (), ["default"]),
    ],
)
def test_a_machine_runs_the_libraries_whose_instructions_it_has_the_best_first(
    machine: str, features: tuple[str, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "INSTRUCTION_SETS", library.instruction_sets_of(machine))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(features, True))
    assert library.supported() == expected


def test_two_libraries_in_one_process_are_two() -> None:
    """Otherwise whatever is tested for each instruction set would be tested for the first alone."""
    built = [name for name in library.supported() if library.library_path(name).exists()]
    if len(built) < 2:
        pytest.skip("this machine can run one library at most")
    modules = [library.load_library(name) for name in built]
    assert len(set(map(id, modules))) == len(built)
    assert len({id(module.linear) for module in modules}) == len(built)


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


def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "INSTRUCTION_SETS", library.instruction_sets_of("x86_64"))
    old = tmp_path / "old-compiler"
    old.write_text('#!/bin/sh\nfor flag in "$@"; do [ "$flag" != -mavxvnni ] || exit 1; done\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    assert build.known_instruction_sets() == ["avx512_bf16", "avx512", "avx2"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"The C++ compiler ({old}) does not know -mavx2 ")
    assert line.endswith("-mavxvnni: avx2_vnni is not built.")
