"""Detects changes of a file between two reads."""

from pathlib import Path

from pagewire_common.start_error import StartError

Version = tuple[int, ...]
"""Device, inode, size and time of the last change."""


def version_of(file: Path) -> Version:
    """Raises StartError if the file cannot be read."""
    try:
        found = file.stat()
    except OSError as error:
        raise StartError(f"cannot read {file}: {error.strerror}") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def check_unchanged(file: Path, version: Version) -> None:
    """Raise StartError if the file has changed."""
    if version_of(file) != version:
        raise StartError(f"{file} was changed while it was read; start again once it is complete")
