"""Detects that a file has changed between two times when it is read."""

from pathlib import Path

from pagewire_common.start_error import StartError

Version = tuple[int, ...]
"""Attributes of a file that change when the file's content changes."""


def version_of(file: Path) -> Version:
    """The file's current version: device, inode, size and time of the last change. Raises StartError if the file does
    not exist."""
    try:
        found = file.stat()
    except OSError as error:
        raise StartError(f"cannot read {file}: {error.strerror}") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def check_unchanged(file: Path, version: Version) -> None:
    """Raise StartError if the file no longer has this version."""
    if version_of(file) != version:
        raise StartError(f"{file} was changed while it was read; start again once it is complete")
