"""The source of API keys: a file, which is read again when it changes, and an environment variable.

A changed file is read once two looks in a row find it unchanged: it may be half written.

Many editors write a new file and rename it. Compose and a Kubernetes `subPath` can mount the file itself. This process
then keeps seeing the old file, and a revoked key stays valid. So mount its folder.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import structlog

from pagewire_common.start_error import StartError
from scheduler_service.access.keys import Keyring, read_keys

log = structlog.get_logger()

LOOK_SECONDS = 1.0
"""Seconds between two looks at the file."""
_MOUNT = "mount its folder, and name the file in it"


class KeyFile:
    """`keyring` has the keys that calls need, or is None if neither a file nor a key is given.

    Raises StartError if the keys cannot be used.
    """

    def __init__(self, file: Path | None, plain: str | None) -> None:
        self._file = file
        self._plain = plain
        self._stamp = self._look()  # before the file is read, so that a change in between is noticed
        self.keyring: Keyring | None = None
        if file is not None and os.path.ismount(file):
            log.warning("the file of API keys is mounted by itself: it may change unseen", file=str(file), do=_MOUNT)
        if file is not None or plain is not None:
            try:
                self.keyring = read_keys(file, plain)
            except (OSError, ValueError, RecursionError) as error:
                raise StartError(f"cannot use the API keys of {file or 'the environment'}: {error}") from None

    def _look(self) -> tuple[int, ...] | None:
        """A value that changes with the file, and with the right to read it."""
        try:
            status = self._file.stat() if self._file is not None else None
        except OSError:
            return None
        return None if status is None else (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)

    async def watch(self, tell: Callable[[Keyring], None]) -> None:
        """Call `tell` with the keys whenever the file has changed, until cancelled.

        A file that is invalid or unreadable changes nothing.
        """
        seen = self._stamp
        while self._file is not None:
            await asyncio.sleep(LOOK_SECONDS)
            before, seen = seen, self._look()
            if seen == self._stamp or seen != before:
                continue
            found: Keyring | Exception
            try:
                found = await asyncio.to_thread(read_keys, self._file, self._plain)
            except Exception as error:  # the parser may raise other errors than ours
                found = error
            if self._look() != seen:
                continue  # it was written to meanwhile
            self._stamp = seen
            if isinstance(found, Keyring):
                tell(found)
                self._log_change(found)
                continue
            reason = str(found) or type(found).__name__
            log.error("changed API keys cannot be used; the old ones stay", file=str(self._file), reason=reason)

    def _log_change(self, keyring: Keyring) -> None:
        before, self.keyring = self.keyring, keyring
        assert before is not None
        old, new = before.by_id, keyring.by_id
        changed = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
        added, removed = sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys())
        log.info("API keys read again", keys=len(new), added=added, removed=removed, changed=changed)
        if self._file is not None and self._is_replaced(self._file):
            log.error("the file of API keys was replaced, and only the old one can be seen here", do=_MOUNT)

    @staticmethod
    def _is_replaced(file: Path) -> bool:
        """Whether the mounted file is no longer in any folder, because another file has taken its name."""
        try:
            return file.stat().st_nlink == 0
        except OSError:
            return False
