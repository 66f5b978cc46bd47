"""The compiled kernels of every instruction set that this machine has. `make setup` builds the best one alone; the
first test that needs another has all of them built."""

from functools import cache
from types import ModuleType

import pytest

from kernels.cpu import build, library


def load_cpu_library(name: str) -> ModuleType:
    if name not in library.supported():
        pytest.skip(f"this machine has no {name}")
    if name not in _built():
        pytest.skip(f"no compiler of this machine compiles the kernels for {name}")
    return library.load_library(name)


def load_cpu_libraries() -> list[ModuleType]:
    """The best first. A test that needs more than there are is skipped."""
    found = list(map(library.load_library, _built()))
    if len(found) < 2:
        pytest.skip("this machine has one library at most")
    return found


@cache
def _built() -> list[str]:
    names = library.supported()
    if not all(library.library_path(name).exists() for name in names) and not build.what_is_missing():
        build.build(build.known_instruction_sets(names))
    return [name for name in names if library.library_path(name).exists()]
