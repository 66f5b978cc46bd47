"""Requirements from pyproject.toml's dependency groups: python deploy/wheel/requirements.py GROUP …

Images install one group, which is less than a wheel requires.
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def requirements_of(*groups: str) -> list[str]:
    """The requirements of groups and of the groups that they include, sorted, each once."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    found: set[str] = set()
    for entry in (entry for group in groups for entry in table[group]):
        found.update([entry] if isinstance(entry, str) else requirements_of(entry["include-group"]))
    return sorted(found)


def pins(*packages: str) -> list[str]:
    """The lines of constraints.txt for these packages."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line.partition("==")[0] in packages]


if __name__ == "__main__":
    print("\n".join(requirements_of(*sys.argv[1:])))
