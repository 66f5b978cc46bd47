"""Locates the compiled libraries of CPU kernels, determines which of them this machine can run, and loads them."""

import hashlib
import platform
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

FLAGS = ("-DTORCH_EXTENSION_NAME=pagewire_cpu", "-std=c++20", "-fPIC", "-O3", "-fno-math-errno", "-fvisibility=hidden")
"""Compiler flags for the libraries of all instruction sets. Symbols are hidden, so that two libraries in one process do
not share their static variables."""


class InstructionSet(NamedTuple):
    """An instruction set for which a library of CPU kernels can be compiled."""

    flags: tuple[str, ...]  # compiler flags for this instruction set, in addition to FLAGS
    features: tuple[str, ...] = ()  # required CPU features, by their names in torch


_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2")
_AVX2_FEATURES = ("avx2", "fma3", "f16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
_AVX512_FEATURES = (*_AVX2_FEATURES, "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
_TORCH_AVX512 = ("-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512")
_TORCH_DEFAULT = ("-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT")
# The flag for SLEEF is needed on ARM, where torch's NEON vectors would compute exponentials and logarithms one element
# at a time without it. For x86, torch needs no such flag.
_TORCH_NEON = (*_TORCH_DEFAULT, "-DAT_BUILD_ARM_VEC256_WITH_SLEEF")


def instruction_sets_of(machine: str) -> dict[str, InstructionSet]:
    """The instruction sets of a processor architecture, beginning with the best. machine: the architecture's name, as
    `platform.machine` returns it."""
    match machine:
        case "x86_64" | "AMD64":
            return {
                "avx512_bf16": InstructionSet(
                    (*_AVX512, "-mavx512bf16", "-mavx512vnni", *_TORCH_AVX512),
                    (*_AVX512_FEATURES, "avx512_bf16", "avx512_vnni"),
                ),
                "avx512": InstructionSet((*_AVX512, *_TORCH_AVX512), _AVX512_FEATURES),
                "avx2_vnni": InstructionSet((*_AVX2, "-mavxvnni"), (*_AVX2_FEATURES, "avx_vnni")),
                "avx2": InstructionSet(_AVX2, _AVX2_FEATURES),
            }
        case "aarch64" | "arm64":
            return {
                "neon_dotprod": InstructionSet(("-march=armv8.2-a+dotprod", *_TORCH_NEON), ("neon", "dot")),
                "neon": InstructionSet(_TORCH_NEON, ("neon",)),
            }
        case _:
            return {"default": InstructionSet(_TORCH_DEFAULT)}


INSTRUCTION_SETS = instruction_sets_of(platform.machine())
FOLDER = Path(__file__).parent / "lib"
SOURCES = Path(__file__).parent / "csrc"


def library_path(instruction_set: str) -> Path:
    """The path of the library for an instruction set. The name of the file contains the versions of Python and torch,
    and a hash of the sources and the compiler flags.

    A library works only with the versions of Python and torch for which it was built. A library for other versions has
    another file name, so it is not loaded.
    """
    digest = hashlib.sha256(repr((FLAGS, INSTRUCTION_SETS[instruction_set].flags)).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    built_for = f"{sys.implementation.cache_tag}-torch{torch.__version__}"
    return FOLDER / f"{instruction_set}-{built_for}-{digest.hexdigest()[:12]}.so"


def what_is_missing() -> str:
    """The reason why no compiled library can be loaded on this machine, as a text for the log."""
    if not supported():
        return f"a processor with the instructions of {' or of '.join(INSTRUCTION_SETS)}"
    if any(FOLDER.glob("*.so")):
        needed = "compiled kernels of these sources, this Python, this torch and this processor"
        return f"{needed} (there are only others): run python -m kernels.cpu.build"
    return "compiled kernels (see the README's requirements)"


def supported() -> list[str]:
    """The instruction sets that this machine's processor supports, beginning with the best."""
    have = torch.cpu.get_capabilities()
    return [name for name, needed in INSTRUCTION_SETS.items() if all(have.get(feature) for feature in needed.features)]


def load_library(instruction_set: str) -> ModuleType:
    """Load the library for an instruction set. Raises ImportError if the library has not been built."""
    path = str(library_path(instruction_set))
    # Each library gets its own module name, because pybind11 caches modules by name. If two libraries had the same
    # module name, loading the second library would return the first.
    name = f"{instruction_set}.pagewire_cpu"
    spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
