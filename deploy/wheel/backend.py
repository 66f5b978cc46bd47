"""setuptools as the build backend, with the packages that generate and compile code for a wheel.

`pip wheel . -C kernels=none` compiles no kernels: the wheel contains the libraries of kernels/cpu/lib, if any.
"""

from pathlib import Path

from requirements import ROOT, pins
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

Settings = dict[str, str] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    compiles = (config_settings or {}).get("kernels") != "none" and Path(ROOT, "kernels").is_dir()
    packages = ["grpcio-tools", *(["torch"] if compiles else [])]
    return [*build_meta.get_requires_for_build_wheel(config_settings), *pins(*packages)]
