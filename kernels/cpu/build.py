"""Compiles the CPU kernels: python -m kernels.cpu.build

One library is built for each instruction set that this kind of machine may have, whatever the building machine itself
has, so that an image built anywhere runs everywhere. Without a compiler or Python's headers nothing is built and one
line says so: the kernels are then eager torch. A compiler must have C++20 and its library, as GCC has from 11 on. For
an instruction set that it does not know there is no library, and one line says that too: machines that have it run the
next.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from kernels.cpu.library import FOLDER, INSTRUCTION_SETS, SOURCES, library_path

_SOURCES = sorted(map(str, SOURCES.glob("*.cpp")))


def main() -> None:
    if missing := _missing():
        sys.stderr.write(f"There is no {missing}: the CPU kernels are not built, and a worker runs on eager torch.\n")
        return
    FOLDER.mkdir(exist_ok=True)
    places = {name: library_path(name) for name in known_instruction_sets()}  # hashed before the sources are read
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        # In processes of their own: torch also loads the library that it has built, and dies if the instructions are
        # missing.
        children = {
            name: subprocess.Popen(
                [sys.executable, "-m", "kernels.cpu.build", name, str(Path(folder, name))],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name in places
        }
        outputs = {name: child.communicate()[0] for name, child in children.items()}
        for name, output in outputs.items():
            if not Path(folder, name, "pagewire_cpu.so").exists():
                sys.exit(f"{output}\nThe CPU kernels could not be built for {name}.")
        for old in FOLDER.glob("*.so"):
            old.unlink()
        for name, place in places.items():
            Path(folder, name, "pagewire_cpu.so").replace(place)


def known_instruction_sets() -> list[str]:
    """Those whose flags the compiler takes; of each other a line says that it is left out. Where it takes none, all of
    them: something else is wrong with it then, and building shows what."""
    compiler = _compiler()
    compile_nothing = [compiler, "-E", "-x", "c++", os.devnull]
    codes = {
        name: subprocess.run([*compile_nothing, *found.flags], capture_output=True, check=False).returncode
        for name, found in INSTRUCTION_SETS.items()
    }
    if all(codes.values()):
        return list(INSTRUCTION_SETS)
    for name in (name for name, code in codes.items() if code):
        flags = " ".join(flag for flag in INSTRUCTION_SETS[name].flags if flag.startswith("-m"))
        sys.stderr.write(f"The C++ compiler ({compiler}) does not know {flags}: {name} is not built.\n")
    return [name for name, code in codes.items() if not code]


def _compiler() -> str:
    from torch.utils.cpp_extension import get_cxx_compiler

    return str(get_cxx_compiler())  # type: ignore[no-untyped-call]


def _missing() -> str | None:
    compiler = _compiler()
    if shutil.which(compiler) is None:
        return f"C++ compiler ({compiler})"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.exists() else f"{header} (a package like python3-dev has it)"


def _build(name: str, folder: Path) -> None:
    from torch.utils.cpp_extension import load

    folder.mkdir()
    # Hidden, or libraries of several instruction sets in one process would share their static variables.
    flags = ["-O3", "-fno-math-errno", "-fvisibility=hidden", *INSTRUCTION_SETS[name].flags]
    load("pagewire_cpu", _SOURCES, extra_cflags=flags, build_directory=str(folder))


if __name__ == "__main__":
    if sys.argv[1:]:
        _build(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
