"""Which CPU kernels are compiled, where, and by how many compilers; and what a machine has that cannot compile them."""

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cpu_libraries import load_cpu_libraries

from kernels import backends, reference
from kernels.cpu import build, library
from kernels.sampling import eager as sampling
from kernels.sampling import ops as sampling_ops

CPU = torch.device("cpu")


@pytest.fixture
def _without_libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nothing had been built."""
    backends.ops_for.cache_clear()
    sampling_ops.sampling_ops_for.cache_clear()
    monkeypatch.setattr(library, "library_path", lambda name: library.FOLDER / f"{name}-that-is-not-there.so")
    monkeypatch.delitem(sys.modules, "kernels.cpu.ops", raising=False)
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


@pytest.mark.parametrize(("version", "is_same"), [("2.13.0+cu130", True), ("2.13.0+git1", False), ("2.14.0", False)])
def test_a_library_fits_every_build_of_torchs_version(
    version: str, is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel that was built beside the CPU build runs beside the CUDA build of PyPI."""
    (name, *_) = library.INSTRUCTION_SETS
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    path = library.library_path(name)
    monkeypatch.setattr(torch, "__version__", version)
    assert (library.library_path(name) == path) is is_same


def test_two_libraries_in_one_process_are_two() -> None:
    """Otherwise whatever is tested for each instruction set would be tested for the first alone."""
    modules = load_cpu_libraries()
    assert len(set(map(id, modules))) == len(modules)
    assert len({id(module.linear) for module in modules}) == len(modules)


def test_without_a_compiler_one_line_says_so_and_what_was_built_stays() -> None:
    before = set(library.FOLDER.glob("*.so"))
    done = subprocess.run(
        [sys.executable, "-m", "kernels.cpu.build"],
        env=os.environ | {"CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("There is no C++ compiler (no-such-compiler)")
    assert before <= set(library.FOLDER.glob("*.so")), "another process of tests may build meanwhile"


def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "INSTRUCTION_SETS", library.instruction_sets_of("x86_64"))
    old = tmp_path / "old-compiler"
    old.write_text('#!/bin/sh\nfor flag in "$@"; do [ "$flag" != -mavxvnni ] || exit 1; done\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    assert build.known_instruction_sets(list(build.INSTRUCTION_SETS)) == ["avx512_bf16", "avx512", "avx2"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"The C++ compiler ({old}) does not know -mavx2 ")
    assert line.endswith("-mavxvnni: avx2_vnni is not built.")


@pytest.mark.parametrize(("arguments", "expected"), [([], ["avx512"]), (["--all"], ["avx512", "avx2_vnni", "avx2"])])
def test_built_is_the_best_that_this_machine_has_or_what_all_machines_of_its_kind_may_have(
    arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    sets = library.instruction_sets_of("x86_64")
    monkeypatch.setattr(build, "INSTRUCTION_SETS", {name: sets[name] for name in ("avx512", "avx2_vnni", "avx2")})
    monkeypatch.setattr(build, "supported", lambda: ["avx512", "avx2"])
    monkeypatch.setattr(build, "what_is_missing", lambda: "")
    monkeypatch.setattr(build, "known_instruction_sets", list)
    monkeypatch.setattr(build, "build", built.extend)
    monkeypatch.setattr(sys, "argv", ["build", *arguments])
    build.main()
    assert built == expected


class Compiler:
    """In place of a real one, and all that it is asked to make. It fails for sources with this word in their names."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._log, self._program = folder / "log", folder / "compiler"
        self.refuse("nothing")
        monkeypatch.setenv("CXX", str(self._program))
        self.folder = folder / "lib"
        monkeypatch.setattr(library, "FOLDER", self.folder)
        monkeypatch.setattr(build, "FOLDER", self.folder)

    def refuse(self, word: str) -> None:
        self._program.write_text(
            f"""#!/bin/sh
for argument in "$@"; do
  case "$argument" in *{word}*.cpp) echo "cannot read $argument"; exit 1;; esac
  target=$argument
done
echo "$target" | tee -a {self._log} > "$target"
"""
        )
        self._program.chmod(0o755)

    def made(self) -> list[str]:
        return sorted(Path(line).suffix for line in self._log.read_text().splitlines())


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(tmp_path, monkeypatch)


@pytest.fixture
def two() -> list[str]:
    return (list(library.INSTRUCTION_SETS) * 2)[:2]


def test_processes_that_need_a_library_at_once_have_it_built_once(
    compiler: Compiler, two: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(build.build, [two[:1]] * 4))
    assert compiler.made() == [".o", ".o", ".o", ".so"]
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith(f"Compiling the CPU kernels for {two[0]}: 3 files")
    assert [line.split(":")[0] for line in others] == ["  1 of 3", "  2 of 3", "  3 of 3"]


def test_what_is_built_already_stays_and_what_is_of_other_sources_goes(compiler: Compiler, two: list[str]) -> None:
    build.build(two[:1])
    (compiler.folder / "avx2-of-other-sources.so").touch()
    build.build(two)
    assert set(compiler.folder.glob("*.so")) == {library.library_path(name) for name in two}
    assert compiler.made().count(".so") == len(set(two))


def test_a_build_that_fails_says_why_and_leaves_no_library(compiler: Compiler, two: list[str]) -> None:
    compiler.refuse("packing")
    with pytest.raises(build.BuildError, match=rf"(?s)cannot read .*packing.cpp.*could not be built for {two[0]}"):
        build.build(two[:1])
    assert [path.name for path in compiler.folder.iterdir()] == [".lock"]


@pytest.mark.parametrize(("limit", "cores", "expected"), [("4000000000", 16, 2), ("max", 1, 1), ("1000", 16, 1)])
def test_compilers_are_no_more_than_cores_and_memory_bear(
    limit: str, cores: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.stat").write_text("anon 500000000\nfile 3000000000\n")
    monkeypatch.setattr(build, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert build.num_compilers() == expected
