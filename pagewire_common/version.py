"""The version of this package, as pip has it."""

from importlib.metadata import version

DISTRIBUTION = "pagewire"


def version_of(program: str) -> str:
    """The text of --version."""
    return f"{program} {version(DISTRIBUTION)}"
