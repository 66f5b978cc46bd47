"""Builds the wheel: generates the code of protos/, compiles this machine's CPU kernels, and lists the requirements.

deploy/wheel/backend.py decides whether torch is there, without which no kernels are compiled.
"""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import rmtree

from requirements import requirements_of  # in deploy/wheel, the backend's folder
from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    TORCH = f"torch=={version('torch').partition('+')[0]}"  # the compiled kernels fit only this version
except PackageNotFoundError:
    TORCH = "torch"


class Platform(Distribution):
    """A distribution whose wheel fits only this machine's kind if it has kernels."""

    def has_ext_modules(self) -> bool:
        return TORCH != "torch"


class Build(build_py):
    def run(self) -> None:
        rmtree(self.build_lib, ignore_errors=True)  # another build's files
        super().run()
        if not self.editable_mode:  # there, `make` generates and compiles
            self.generate()

    def generate(self) -> None:
        protos = map(str, Path("protos/pagewire/v1").glob("*.proto"))
        outputs = [f"--{kind}_out={self.build_lib}" for kind in ("python", "pyi", "grpc_python")]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", *outputs, *protos], check=True)
        if TORCH != "torch":
            subprocess.run([sys.executable, "-m", "kernels.cpu.build"], cwd=self.build_lib, check=True)
            Path(self.build_lib, "kernels/cpu/lib/.lock").unlink(missing_ok=True)


requirements = [TORCH if name == "torch" else name for name in requirements_of("scheduler", "worker", "client")]
setup(cmdclass={"build_py": Build}, distclass=Platform, install_requires=requirements)
