"""A process's temporary folders, for sockets and copies of adapters, which are removed when the process ends.

A killed process leaves its folders, which the next service removes, because no lock holds them. A folder that belongs
to or is open to another user is skipped.
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
    """A new folder that only its owner may enter. Raises OSError."""

    def __init__(self, kind: str) -> None:
        for _ in range(_MAX_TRIES):
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
            self._lock = _locked(self.path)
            if self._lock is not None:
                return  # a starting service may remove a folder that is not locked yet
            with contextlib.suppress(OSError):
                self.path.rmdir()
        raise OSError(
            f"no folder in {tempfile.gettempdir()} can be locked, or kept from other users; set TMPDIR to one on this "
            "machine's own disk"
        )

    def close(self) -> None:
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_dead_folders() -> None:
    """Remove the folders of this user's killed processes."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if (lock := _locked(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            log.info("folder of a process that was killed removed", folder=str(path))


def _locked(path: Path) -> int | None:
    """Lock a folder. Returns None if a process holds the lock, or if the folder is not private to this user."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # child processes do not inherit it
    except OSError:
        return None
    with contextlib.suppress(OSError):
        status = os.fstat(folder)
        if status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # false if another process removed the folder before it was locked
            if os.path.samestat(status, os.lstat(path)):
                return folder
    os.close(folder)
    return None
