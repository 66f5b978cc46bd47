"""The version of this package, from pip's metadata."""

from importlib.metadata import version

DISTRIBUTION = "pagewire"


def version_of(program: str) -> str:
    """The text that --version prints."""
    return f"{program} {version(DISTRIBUTION)}"
