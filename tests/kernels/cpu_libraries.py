"""The compiled kernels of this machine's instruction sets. `make setup` builds only the best.

The first test that needs another library builds those of `tested_sets`, or else just its own.
"""

from functools import cache
from types import ModuleType

import pytest

from kernels.cpu import build, library


def tested_sets() -> list[str]:
    """The best and the simplest instruction set of this machine: a library takes two minutes of a core."""
    names = library.supported() or list(library.INSTRUCTION_SETS)
    return list(dict.fromkeys((names[0], names[-1])))


def load_cpu_library(name: str) -> ModuleType:
    if name not in library.supported():
        pytest.skip(f"this machine has no {name}")
    if not is_built(name):
        pytest.skip(f"no compiler of this machine compiles the kernels for {name}")
    return library.load_library(name)


def load_cpu_libraries() -> list[ModuleType]:
    """The libraries of `tested_sets`, the best first. A test that needs two is skipped if there is one."""
    found = [library.load_library(name) for name in tested_sets() if name in library.supported() and is_built(name)]
    if len(found) < 2:
        pytest.skip("this machine has one library at most")
    return found


@cache
def is_built(name: str) -> bool:
    """Whether the library exists, after building it if there is a compiler."""
    if not library.library_path(name).exists() and not build.what_is_missing():
        names = [other for other in tested_sets() if other in library.supported()]
        build.build(build.known_instruction_sets(list(dict.fromkeys((name, *names)))))
    return library.library_path(name).exists()
