"""A process's temporary folders, as for sockets and copies of adapters. They are removed when it ends.

A killed process leaves its folders. Each folder is locked while its process lives, so that the next start finds the
abandoned folders. The parent folder is shared by all users, so a folder that is not this user's own, or is open to
others, is skipped unopened.
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
    """A new folder that only its owner may enter, until it is closed or the process ends. Raises OSError."""

    def __init__(self, kind: str) -> None:
        for _ in range(_MAX_TRIES):
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
            self._lock = _locked(self.path)
            if self._lock is not None:
                return  # otherwise a starting process saw it unlocked, and removes it
            with contextlib.suppress(OSError):
                self.path.rmdir()
        raise OSError(
            f"no folder in {tempfile.gettempdir()} can be locked, or kept from other users; set TMPDIR to one on this "
            "machine's own disk"
        )

    def close(self) -> None:
        """Remove the folder; a second call has no effect."""
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
    """The lock of a folder. None if a process holds it, or the folder is not this user's alone."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # closed in child processes
    except OSError:
        return None
    with contextlib.suppress(OSError):
        status = os.fstat(folder)
        if status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(status, os.lstat(path)):  # the folder was not removed before it was locked
                return folder
    os.close(folder)
    return None
