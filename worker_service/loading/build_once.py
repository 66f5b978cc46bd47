"""Builds folders in the cache; one process builds, any number wait and read. A folder gets its final name only when
complete. The next build removes the remains of a killed one."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from pagewire_common.start_error import StartError


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Let `build` fill `folder` if it does not exist. Raises StartError if the folder cannot be written."""
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Opened for reading, because the lock file may belong to another user.
        lock = os.open(folder.with_name(folder.name + ".lock"), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the operating system if this process dies
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
        # Other users, such as a container's, must be able to read all files.
        for file in partial.rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)
        partial.chmod(0o755)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
