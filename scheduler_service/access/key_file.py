"""Reads API keys from a key file, again after each change, and from an environment variable.

A changed file may be half written, so two consecutive checks must find the same state. Mount the file's folder, not the
file alone: an editor would replace the file, and the process would keep a revoked key.
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
"""Seconds between two checks of the key file."""
_MOUNT = "mount its folder, and name the file in it"


class KeyFile:
    """The API keys of a key file and of an environment variable.

    `keyring` is None if neither is given: calls then need no key. Raises StartError.
    """

    def __init__(self, file: Path | None, plain: str | None) -> None:
        self._file = file
        self._plain = plain
        self._stamp = self._look()  # before the file is read, to notice a change meanwhile
        self.keyring: Keyring | None = None
        if file is not None and os.path.ismount(file):
            log.warning(
                "the file of API keys is mounted without its folder: changes may go unnoticed",
                file=str(file),
                do=_MOUNT,
            )
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
        """Call `tell` with the new keys after each change, until cancelled. Invalid changes have no effect."""
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
        """Whether another file has replaced the mounted key file, which is then in no folder."""
        try:
            return file.stat().st_nlink == 0
        except OSError:
            return False
