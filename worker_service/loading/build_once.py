"""Folders that one process builds and many processes then read, even if all processes start at the same time.

A complete folder is renamed to its final name, so any process can use a folder with a final name without a lock. If a
builder is killed, its half-built folder still has a temporary name. The next builder removes this folder.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from pagewire_common.start_error import StartError


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`. If the folder does not exist, `build` fills it first. Waits while another process builds the
    folder.

    Raises any error of `build`. Raises StartError if the folder cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The lock file is opened for reading, because it may belong to another user.
        lock = os.open(folder.with_name(folder.name + ".lock"), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases the lock if this process dies
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
        # Make the files readable for other users, such as a container's user. Some files are created with permissions
        # for their owner only.
        for file in partial.rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)
        partial.chmod(0o755)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
