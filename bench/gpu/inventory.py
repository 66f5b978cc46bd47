"""Lists a machine's Python version and packages, on the GPU machine and with only the standard library."""

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
    """The properties that decide which wheels a machine can install."""

    python: str
    """Major and minor version, such as 3.12."""
    machine: str
    """Processor architecture, such as x86_64."""
    glibc: str
    """Major and minor version, such as 2.35."""
    packages: Mapping[str, str | None]
    """Version of each package by normalised name; None if unknown."""

    @classmethod
    def of_this_machine(cls) -> Self:
        return cls(
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            machine=platform.machine(),
            glibc=platform.libc_ver()[1] or "2.17",
            packages={
                normalised(name): found.version
                for found in distributions()
                # a partly removed package has no name in its metadata
                if (name := found.metadata["Name"])
            },
        )

    @classmethod
    def read(cls, file: Path) -> Self:
        """Raises ValueError if the file is not an inventory."""
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
    """The form by which package indexes compare names."""
    return name.lower().replace("_", "-").replace(".", "-")
