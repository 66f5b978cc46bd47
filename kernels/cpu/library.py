"""Where the compiled CPU kernels lie, and which of them this machine can run."""

import platform
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
_TORCH_AVX512 = ("-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512")
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = (
    {
        "avx512_bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni", *_TORCH_AVX512),
        "avx512": (*_AVX512, *_TORCH_AVX512),
        "avx2": ("-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"),
    }
    if platform.machine() in ("x86_64", "AMD64")
    else {"default": ("-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT")}
)
"""Compiler flags of each, the best first."""


def library_path(instruction_set: str) -> Path:
    """A library works with the torch that it was built for alone, so its name says which."""
    return Path(__file__).parent / "lib" / f"{instruction_set}-torch{torch.__version__}.so"


def supported() -> list[str]:
    """What this machine can run, the best first."""
    have = {
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported(),
        "avx512": torch.cpu._is_avx512_supported(),
        "avx2": torch.cpu._is_avx2_supported(),
        "default": True,
    }
    return [name for name in INSTRUCTION_SETS if have[name]]


def load_library(instruction_set: str) -> ModuleType:
    """Raises ImportError where it is not built."""
    path = str(library_path(instruction_set))
    spec = spec_from_file_location("pagewire_cpu", path, loader=ExtensionFileLoader("pagewire_cpu", path))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
