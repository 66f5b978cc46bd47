"""Folders for what a process keeps beside its memory, as sockets and copies of adapters. They end with it.

A process that is killed leaves its folders. Each is locked for as long as its process lives, so that the next start
finds those that are dead. In a folder that all users share, a name says nothing: what is not this user's own, or is
open to others, is passed over, and nothing in it is opened.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

import structlog

log = structlog.get_logger()

_PREFIX = "pagewire-tmp-"
_MAX_TRIES = 5


class TemporaryFolder:
    """A new folder that only its owner may enter, until it is closed, or the process is over. Raises OSError."""

    def __init__(self, kind: str) -> None:
        for _ in range(_MAX_TRIES):
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
            self._lock = _locked(self.path)
            if self._lock is not None:
                return  # else one that starts has found it not locked yet, and removes it
            with contextlib.suppress(OSError):
                self.path.rmdir()
        raise OSError(
            f"no folder in {tempfile.gettempdir()} can be locked, or kept from other users; set TMPDIR to one on this "
            "machine's own disk"
        )

    def close(self) -> None:
        """Remove it. Doing so again does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_dead_folders() -> None:
    """Remove the folders of this user's processes that were killed: nothing else would."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if (lock := _locked(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            log.info("folder of a process that was killed removed", folder=str(path))


def _locked(path: Path) -> int | None:
    """The lock of a folder; None where a process has it, or it is not a folder that is this user's alone."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # closed in child processes
    except OSError:
        return None
    with contextlib.suppress(OSError):
        status = os.fstat(folder)
        if status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(status, os.lstat(path)):  # it was not removed before the lock was had
                return folder
    os.close(folder)
    return None
