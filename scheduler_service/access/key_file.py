"""Reads API keys from a key file, which is read again after a change, and from an environment variable.

A changed key file may be half written, so it is read only after two consecutive checks find the same state of the file.

Many editors replace a file: they write a new file and rename it. Compose and a Kubernetes `subPath` can mount a key
file without its folder. If a key file that is mounted without its folder is replaced, the process continues to see the
old file, and a revoked key stays valid. Mount the folder of the key file, not the key file itself.
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
"""Seconds between two checks whether the key file has changed."""
_MOUNT = "mount its folder, and name the file in it"


class KeyFile:
    """The API keys of a key file, and the API key of an environment variable.

    `keyring` has all keys. `keyring` is None if neither a key file nor an environment variable is given, so that calls
    need no key. Raises StartError if the keys are unreadable or invalid.
    """

    def __init__(self, file: Path | None, plain: str | None) -> None:
        self._file = file
        self._plain = plain
        self._stamp = self._look()  # before the file is read, to notice a change during reading
        self.keyring: Keyring | None = None
        if file is not None and os.path.ismount(file):
            log.warning("the file of API keys is mounted by itself: it may change unseen", file=str(file), do=_MOUNT)
        if file is not None or plain is not None:
            try:
                self.keyring = read_keys(file, plain)
            except (OSError, ValueError, RecursionError) as error:
                raise StartError(f"cannot use the API keys of {file or 'the environment'}: {error}") from None

    def _look(self) -> tuple[int, ...] | None:
        """A value that changes whenever the key file or its permissions change."""
        try:
            status = self._file.stat() if self._file is not None else None
        except OSError:
            return None
        return None if status is None else (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)

    async def watch(self, tell: Callable[[Keyring], None]) -> None:
        """Call `tell` with the new keys after each change of the key file, until cancelled.

        If the key file becomes invalid or unreadable, the old keys stay in use.
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
            except Exception as error:  # the parser may raise any error
                found = error
            if self._look() != seen:
                continue  # the file changed during reading
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
        """Whether another file has replaced the mounted key file, which is then no longer in any folder."""
        try:
            return file.stat().st_nlink == 0
        except OSError:
            return False
