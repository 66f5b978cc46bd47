"""Builds folders in the cache, such as converted models. One process builds a folder and many processes read it, even
if all processes start at the same time.

A folder gets its final name when it is complete, so any process can use a folder that has its final name without a
lock. If the building process is killed, the half-built folder still has a temporary name. The next process that builds
the same folder removes the half-built folder.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from pagewire_common.start_error import StartError


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`. If the folder does not exist, it is created, and `build` fills it. The call waits while another
    process builds the folder.

    Raises the errors that `build` raises, and StartError if the folder cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The lock file is opened for reading, because it may belong to another user.
        lock = os.open(folder.with_name(folder.name + ".lock"), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # if this process dies, the operating system releases the lock
            if not folder.is_dir():
                _build(folder, build)
        finally:
            os.close(lock)
    except OSError as error:
        raise StartError(f"cannot write to the cache folder {folder.parent}: {error}") from error
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    prefix = folder.name + ".partial-"
    for leftover in folder.parent.glob(prefix + "*"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        build(partial)
        # Files are made readable for other users, such as a container's user, because some files are created with
        # permissions for their owner only.
        for file in partial.rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)
        partial.chmod(0o755)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
