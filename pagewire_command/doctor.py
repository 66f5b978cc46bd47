"""Says what this machine has for serving, with a verdict on each fact. Exit status 1: serving is impossible here."""

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pagewire_command import machine
from pagewire_common.version import DISTRIBUTION

GIB = 2**30
MIN_BYTES = GIB
"""Free memory with which the default model is served: both services took 0.9 GiB (proportional set size)."""
CACHE_SHARE = 0.2
"""Share of the memory that is left for keys and values."""
MODEL_BYTES = 0.4 * GIB
"""Free disk for the default model: the download and its conversion."""


class Fact(NamedTuple):
    name: str
    found: str
    verdict: str
    serves: bool = True
    """False if serving is impossible."""


def make_parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument(
        "--cache",
        metavar="FOLDER",
        type=Path,
        default=Path(os.environ.get("PAGEWIRE_CACHE") or "~/.cache/pagewire"),
        help="folder of models (default %(default)s)",
    )
    return parser


def main(program: str) -> None:
    arguments = make_parser(program).parse_args()
    facts = list(examine(arguments.cache.expanduser()))
    try:
        _show(facts)
    except ModuleNotFoundError:  # without rich
        sys.stdout.writelines(f"{fact.name}: {fact.found}: {fact.verdict}\n" for fact in facts)
    if not all(fact.serves for fact in facts):
        sys.exit(1)


def _show(facts: list[Fact]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "found", "verdict")
    for fact in facts:
        table.add_row(*fact[:3], style="" if fact.serves else "bold red")
    Console(width=None if sys.stdout.isatty() else 150, markup=False, highlight=False).print(table)


def examine(cache: Path) -> Iterator[Fact]:
    yield _python()
    packages = _packages()
    yield packages
    yield _compiler()
    yield Fact("cores", f"{machine.usable_cores():g}", "a worker uses all of them; PAGEWIRE_THREADS sets fewer")
    if packages.serves:
        yield from _device()
    yield _disk(cache)
    yield from map(_port, machine.PORTS)


def _python() -> Fact:
    serves = sys.version_info >= (3, 11)
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Fact("Python", found, "new enough" if serves else "Python 3.11 or newer is needed", serves)


def _packages() -> Fact:
    missing = []
    needed = [line for line in importlib.metadata.requires(DISTRIBUTION) or () if "extra ==" not in line]
    for name in (match[0] for line in needed if (match := re.match(r"[\w.-]+", line))):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Fact(
            "packages", f"without {', '.join(missing)}", "serving is impossible: install the missing ones", False
        )
    return Fact("packages", f"all {len(needed)} of pagewire {importlib.metadata.version(DISTRIBUTION)}", "complete")


def _compiler() -> Fact:
    name = os.environ.get("CXX", "c++")
    if shutil.which(name) is None:
        return Fact("C++ compiler", f"no {name}", "kernels that are not compiled yet cannot be compiled")
    said = subprocess.run([name, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    return Fact("C++ compiler", said[0] if said else name, "can compile kernels: python -m kernels.cpu.build")


def _device() -> Iterator[Fact]:
    """The facts that need torch: instruction set, GPU, memory, and the models that fit."""
    import torch

    from kernels.backends import EAGER, backend_name
    from kernels.cpu.library import INSTRUCTION_SETS, supported, what_is_missing
    from worker_service.execution.startup.capacity import free_host_bytes

    kernels = backend_name(torch.device("cpu"))
    features = {feature for one in INSTRUCTION_SETS.values() for feature in one.features} | {"amx_tile"}
    have = torch.cpu.get_capabilities()
    verdict = f"kernels are {kernels}"
    if kernels == EAGER:
        verdict = f"{EAGER} computes, several times slower; missing: {what_is_missing()}"
    elif not kernels.endswith(f" {supported()[0]}"):
        verdict += f"; those for {supported()[0]} are faster: python -m kernels.cpu.build"
    yield Fact("instructions", " ".join(sorted(name for name in features if have.get(name))) or "none known", verdict)
    free = free_host_bytes()
    gpus = machine.gpus()
    for gpu in gpus:
        found = f"{gpu.name}, {gpu.free_bytes / GIB:.1f} of {gpu.bytes / GIB:.1f} GiB free"
        yield Fact("GPU", found, "a worker uses it, by Triton's kernels")
    if not gpus:
        yield Fact("GPU", f"none for torch {torch.__version__}", "a worker uses the CPU")
    yield _memory(free)
    yield _models(gpus[0].free_bytes if gpus else free, kernels, on_gpu=bool(gpus))


def _memory(free: int) -> Fact:
    limit = machine.memory_limit()
    found = f"{free / GIB:.1f} GiB free; " + ("no limit" if limit is None else f"limit {limit / GIB:.1f} GiB")
    if free < MIN_BYTES:
        return Fact("memory", found, f"serving is impossible: free {MIN_BYTES / GIB:g} GiB", False)
    return Fact("memory", found, "enough for the default model")


def _models(free: int, kernels: str, *, on_gpu: bool) -> Fact:
    """How many parameters fit, by type of weights, with CACHE_SHARE left for the KV cache."""
    if on_gpu:
        bits = {"bf16": 16.0, "fp8": 8.0}
    else:
        bits = {"bf16": 16.0}
        if kernels.endswith("avx512_bf16"):
            bits["int8"] = 8.5
        if kernels.startswith("compiled"):
            bits |= {"w8a8": 8.5, "int4": 5.0}
    sizes = [f"{name} {free * (1 - CACHE_SHARE) * 8 / per_weight / 1e9:.1f}" for name, per_weight in bits.items()]
    others = "on a GPU" if on_gpu else "with these kernels"
    left = [name for name in ("int8", "int4") if name not in bits]
    return Fact(
        "models",
        f"billions of parameters: {', '.join(sizes)}",
        f"fit, with {CACHE_SHARE:.0%} left for the KV cache" + (f"; no {' or '.join(left)} {others}" if left else ""),
    )


def _disk(cache: Path) -> Fact:
    free = machine.free_disk(cache)
    found = f"{free / GIB:.1f} GiB free for {cache}"
    if free < MODEL_BYTES:
        return Fact("disk", found, "too little for the default model; a model in a folder of its own is served")
    return Fact("disk", found, "enough for the default model; a model takes twice its download if it is converted")


def _port(port: int) -> Fact:
    user = machine.PORTS[port]
    if machine.is_free(port):
        return Fact(f"port {port}", "free", f"the default for {user}")
    return Fact(f"port {port}", "in use", f"{user} needs another: see --listen and its kin in pagewire serve --help")
