"""Finds and loads the compiled libraries that this machine can run."""

import hashlib
import platform
import re
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

FLAGS = ("-DTORCH_EXTENSION_NAME=pagewire_cpu", "-std=c++20", "-fPIC", "-O3", "-fno-math-errno", "-fvisibility=hidden")
"""Compiler flags of all libraries. Hidden symbols keep two libraries' static variables apart."""


class InstructionSet(NamedTuple):
    flags: tuple[str, ...]  # in addition to FLAGS
    features: tuple[str, ...] = ()  # CPU features, by torch's names


_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2")
_AVX2_FEATURES = ("avx2", "fma3", "f16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
_AVX512_FEATURES = (*_AVX2_FEATURES, "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
_TORCH_AVX512 = ("-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512")
_TORCH_DEFAULT = ("-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT")
# Without SLEEF, torch's NEON vectors compute exponentials and logarithms one element at a time. x86 needs no flag.
_TORCH_NEON = (*_TORCH_DEFAULT, "-DAT_BUILD_ARM_VEC256_WITH_SLEEF")


def instruction_sets_of(machine: str) -> dict[str, InstructionSet]:
    """Best first. machine: the architecture, as from `platform.machine`."""
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
    """The name contains the versions of Python and torch, and a hash of sources and flags: other libraries do not
    fit. torch's own builds of a version share all headers but CUDA's: a library of 2.13.0+cpu runs with 2.13.0+cu130.
    """
    digest = hashlib.sha256(repr((FLAGS, INSTRUCTION_SETS[instruction_set].flags)).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    version = re.sub(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)$", "", torch.__version__)
    built_for = f"{sys.implementation.cache_tag}-torch{version}"
    return FOLDER / f"{instruction_set}-{built_for}-{digest.hexdigest()[:12]}.so"


def what_is_missing() -> str:
    """Why no library can be loaded, for the log."""
    if not supported():
        return f"a processor with the instructions of {' or of '.join(INSTRUCTION_SETS)}"
    if any(FOLDER.glob("*.so")):
        needed = "compiled kernels of these sources, this Python, this torch and this processor"
        return f"{needed} (there are only others): run python -m kernels.cpu.build"
    return "compiled kernels (see the README's requirements)"


def supported() -> list[str]:
    """Instruction sets of this processor, best first."""
    have = torch.cpu.get_capabilities()
    return [name for name, needed in INSTRUCTION_SETS.items() if all(have.get(feature) for feature in needed.features)]


def load_library(instruction_set: str) -> ModuleType:
    """Raises ImportError if the library has not been built."""
    path = str(library_path(instruction_set))
    # A module name for each library, because pybind11 caches modules by name.
    name = f"{instruction_set}.pagewire_cpu"
    spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
