"""Compiles the CPU kernels: python -m kernels.cpu.build [--all]

Builds missing libraries for this processor's best instruction set, or with --all for all sets of its architecture, as
for container images. The compiler must support C++20, as GCC 11 does. If a tool or a flag is missing, a line is
printed, and a worker uses the next best library or eager torch.
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
"""Bytes reserved for a compiler process. Peaks with GCC 12: bindings.cpp 1.1 GiB, packing.cpp 0.75 GiB."""
_PARTIAL = "partial-"
_CGROUP = Path("/sys/fs/cgroup")


class BuildError(Exception):
    """Raised with the compiler's output if a build fails."""


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
    """Build missing libraries, each once even if several processes call, and remove those of other sources. Raises
    BuildError."""
    FOLDER.mkdir(exist_ok=True)
    with _alone():
        places = {name: library_path(name) for name in INSTRUCTION_SETS}  # hashes the sources before they are compiled
        absent = {name: places[name] for name in names if not places[name].exists()}
        for dead in FOLDER.glob(f"{_PARTIAL}*"):  # of killed builds: this process has the lock
            shutil.rmtree(dead, ignore_errors=True)
        if absent:
            with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=FOLDER) as folder:
                _compile(absent, Path(folder))
        for old in set(FOLDER.glob("*.so")) - set(places.values()):
            old.unlink()


def known_instruction_sets(names: Sequence[str]) -> list[str]:
    """The sets whose flags the compiler accepts; prints those left out. If the compiler accepts none, all: the build
    will report the compiler's other fault."""
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
    """Returns the compiler or Python's headers, whichever is missing, or ""."""
    compiler = _compiler()
    if shutil.which(compiler) is None:
        return f"C++ compiler ({compiler})"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"{header} (a package like python3-dev has it)"


def num_compilers() -> int:
    """As many as cores and free memory allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, _free_bytes() // _COMPILER_BYTES)))


def _free_bytes() -> float:
    """Free memory of the machine or the control group, whichever is less; infinity if unknown."""
    free = math.inf
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):  # the limit may be "max"
        limit = int((_CGROUP / "memory.max").read_text())
        used = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - int(used["anon"]))
    return free


def _compile(places: dict[str, Path], folder: Path) -> None:
    """Compile all sources, largest first, and link."""
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
    """Lock the folder against other builds."""
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
