"""Compiles the CPU kernels: python -m kernels.cpu.build [--all]

The script builds the library for the best instruction set of this machine's processor. With --all, it builds a library
for each instruction set of the processor's architecture, so that a container image runs on all processors of this
architecture. Existing libraries are kept. If the compiler or Python's headers are missing, the script prints a line and
builds nothing; a worker without a library uses eager torch. The compiler must support C++20 and its standard library,
as GCC 11 does. If the compiler does not support an instruction set, the script prints a line and skips this instruction
set. A machine whose best instruction set was skipped uses the library for its next best instruction set.
"""

import argparse
import contextlib
import fcntl
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from kernels.cpu.library import FLAGS, FOLDER, INSTRUCTION_SETS, SOURCES, library_path, supported

_COMPILER_BYTES = 1.25 * 2**30
"""Memory that is reserved for each compiler process. The peak memory of GCC 12 is 1.1 GiB for bindings.cpp, and 0.75
GiB for packing.cpp."""
_PARTIAL = "partial-"
_CGROUP = Path("/sys/fs/cgroup")


class BuildError(Exception):
    """Raised if a library of CPU kernels cannot be built. The error's message contains the compiler's output."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.build", description="Compiles the CPU kernels.")
    parser.add_argument("--all", action="store_true", help="for all machines of this kind, not for this one alone")
    everything = parser.parse_args().all
    wanted = list(INSTRUCTION_SETS) if everything else supported()
    missing = what_is_missing() if wanted else f"processor with the instructions of {' or of '.join(INSTRUCTION_SETS)}"
    if missing:
        _say(f"There is no {missing}: the CPU kernels are not built, and a worker runs on eager torch.")
        return
    known = known_instruction_sets(wanted)
    try:
        build(known if everything else known[:1])
    except BuildError as error:
        sys.exit(str(error))


def build(names: Sequence[str]) -> None:
    """Build the libraries of CPU kernels that are missing for these instruction sets. Even if several processes call
    this function, each library is built once.

    Libraries that were built from other versions of the sources are removed afterwards. Raises BuildError.
    """
    FOLDER.mkdir(exist_ok=True)
    with _alone():
        places = {name: library_path(name) for name in INSTRUCTION_SETS}  # hashes the sources before they are compiled
        absent = {name: places[name] for name in names if not places[name].exists()}
        for dead in FOLDER.glob(f"{_PARTIAL}*"):  # left by a killed build, since this process holds the lock
            shutil.rmtree(dead, ignore_errors=True)
        if absent:
            with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=FOLDER) as folder:
                _compile(absent, Path(folder))
        for old in set(FOLDER.glob("*.so")) - set(places.values()):
            old.unlink()


def known_instruction_sets(names: Sequence[str]) -> list[str]:
    """The named instruction sets whose flags the compiler accepts. Prints a line for each set that is left out.

    If the compiler accepts no set, returns all names: the compiler has another fault, which the build will report.
    """
    compiler = _compiler()
    compile_nothing = [compiler, "-E", "-x", "c++", os.devnull]
    codes = {
        name: subprocess.run(
            [*compile_nothing, *INSTRUCTION_SETS[name].flags], capture_output=True, check=False
        ).returncode
        for name in names
    }
    if all(codes.values()):
        return list(names)
    for name in (name for name, code in codes.items() if code):
        flags = " ".join(flag for flag in INSTRUCTION_SETS[name].flags if flag.startswith("-m"))
        _say(f"The C++ compiler ({compiler}) does not know {flags}: {name} is not built.")
    return [name for name, code in codes.items() if not code]


def what_is_missing() -> str:
    """Names what is missing on this machine to build libraries: the compiler or Python's headers. The result is empty
    if nothing is missing."""
    compiler = _compiler()
    if shutil.which(compiler) is None:
        return f"C++ compiler ({compiler})"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"{header} (a package like python3-dev has it)"


def num_compilers() -> int:
    """Number of compiler processes that run at once. The number is limited by the machine's cores and by its free
    memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, _free_bytes() // _COMPILER_BYTES)))


def _free_bytes() -> float:
    """Number of bytes of free memory. The result is the free memory of the machine or of the control group, whichever
    is less, or infinity if neither is known."""
    free = math.inf
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):  # the control group's limit may be "max"
        limit = int((_CGROUP / "memory.max").read_text())
        used = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - int(used["anon"]))
    return free


def _compile(places: dict[str, Path], folder: Path) -> None:
    """Compile every source file for every instruction set, and link the libraries. The largest source files are
    compiled first."""
    begun = time.monotonic()
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: -source.stat().st_size)
    jobs = [(name, source) for source in sources for name in places]
    count = min(num_compilers(), len(jobs))
    _say(
        f"Compiling the CPU kernels for {', '.join(places)}: {len(jobs)} files, {count} at a time, "
        "about half a minute each."
    )
    objects = {(name, source): folder / f"{name}-{source.stem}.o" for name, source in jobs}
    with ThreadPoolExecutor(count) as pool:
        running = {pool.submit(_run, name, _compile_command(name, source, objects[name, source])): (name, source)
                   for name, source in jobs}  # fmt: skip
        try:
            for done, job in enumerate(as_completed(running), start=1):
                job.result()
                name, source = running[job]
                _say(f"  {done} of {len(jobs)}: {source.name} for {name}, after {time.monotonic() - begun:.0f} s")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    for name, place in places.items():
        built = folder / place.name
        _run(name, _link_command([objects[name, source] for source in sources], built))
        built.replace(place)


def _run(name: str, command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{done.stdout}\nThe CPU kernels could not be built for {name}.")


def _compile_command(name: str, source: Path, target: Path) -> list[str]:
    from torch.utils.cpp_extension import include_paths

    folders = *include_paths("cpu"), sysconfig.get_path("include")
    includes = [flag for folder in folders for flag in ("-isystem", folder)]
    return [_compiler(), *FLAGS, *INSTRUCTION_SETS[name].flags, *includes, "-c", str(source), "-o", str(target)]


def _link_command(objects: Sequence[Path], target: Path) -> list[str]:
    from torch.utils.cpp_extension import library_paths

    folders = [f"-L{folder}" for folder in library_paths("cpu")]
    libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    of_python = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return [_compiler(), "-shared", *of_python, *map(str, objects), *folders, *libraries, "-o", str(target)]


def _compiler() -> str:
    from torch.utils.cpp_extension import get_cxx_compiler

    return str(get_cxx_compiler())  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold a lock during the with block, so that other processes that build in this folder wait."""
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
