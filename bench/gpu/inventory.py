"""Lists a machine's version of Python and its installed packages. This file runs on the GPU machine and uses only the
standard library.
"""

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Inventory:
    """The properties of a machine that decide which wheels the machine can install."""

    python: str
    """Major and minor version of Python, for example 3.12."""
    machine: str
    """Processor architecture, for example x86_64."""
    glibc: str
    """Major and minor version of glibc, for example 2.35."""
    packages: Mapping[str, str | None]
    """Version of each installed package by its normalised name. The version is None if it is unknown."""

    @classmethod
    def of_this_machine(cls) -> Self:
        return cls(
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            machine=platform.machine(),
            glibc=platform.libc_ver()[1] or "2.17",
            packages={
                normalised(name): found.version
                for found in distributions()
                # a package that was only partly removed has no name in its metadata
                if (name := found.metadata["Name"])
            },
        )

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read an inventory from a file. Raises ValueError if the file is not an inventory."""
        try:
            found = cls(**json.loads(file.read_text()))
            major, minor = found.python.split(".")
            int(major), int(minor), dict(found.packages)
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{file} is not what `pack inventory` prints: {error}") from error
        return found

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)


def normalised(name: str) -> str:
    """The normalised form of a package's name, by which package indexes compare names."""
    return name.lower().replace("_", "-").replace(".", "-")
