"""Appends to a file in a thread, so that a slow disk delays no step.

A killed process loses about FLUSH_SECONDS of data; there is no fsync. An error of the file ends the recording, not the
service.
"""

import itertools
import os
import queue
import threading
from pathlib import Path

import structlog

from pagewire_common.start_error import StartError

log = structlog.get_logger()

# Seconds; at 200 steps a second, a wake-up for each event would cost more than its encoding.
FLUSH_SECONDS = 0.1
MAX_PENDING_BYTES = 256 << 20  # queued bytes above which the disk counts as too slow
CLOSE_SECONDS = 5.0


def next_file(path: Path) -> Path:
    """The file of an engine that follows a lost one: the first of FILE, FILE.2, FILE.3 and so on that is empty."""
    names = itertools.chain([path], (path.with_name(f"{path.name}.{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists() or not name.stat().st_size)


class FileWriter:
    """A new file for its owner only. Raises StartError if the file is unusable or not empty."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        except OSError as error:
            raise StartError(f"--record: {path} cannot be written: {error.strerror}") from error
        if os.fstat(self._file).st_size:  # a recording from before a crash
            os.close(self._file)
            raise StartError(f"--record: {path} holds something already; a recording is never overwritten")
        self._path = path
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._num_added = 0  # bytes queued; written by callers of `add`
        self._num_written = 0  # bytes in the file; written by the thread
        self._failure = ""
        self.is_open = True
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def add(self, data: bytes) -> None:
        if not self.is_open:
            return
        if self._failure:
            self.stop(self._failure)
        elif self._num_added - self._num_written > MAX_PENDING_BYTES:
            self.stop("the disk is too slow")
        else:
            self._num_added += len(data)
            self._queue.put(data)

    def stop(self, reason: str) -> None:
        """End the recording because of a failure, and log it once."""
        if self.is_open:
            self.is_open = False
            self._queue.put(None)
            log.error("recording stopped", file=str(self._path), reason=reason)

    def close(self) -> None:
        """Write the rest, for at most CLOSE_SECONDS."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._failure:
            self.stop(self._failure)
        self.is_open = False

    def _run(self) -> None:
        try:
            while self._write(self._next_batch()):
                pass
        except OSError as error:
            self._failure = error.strerror or str(error)
        finally:
            os.close(self._file)

    def _next_batch(self) -> list[bytes | None]:
        batch = [self._queue.get()]
        self._closing.wait(FLUSH_SECONDS)
        while not self._queue.empty():
            batch.append(self._queue.get())
        return batch

    def _write(self, batch: list[bytes | None]) -> bool:
        """Returns whether more bytes may follow."""
        is_last = None in batch
        data = memoryview(b"".join(item for item in batch if item is not None))
        while data:
            count = os.write(self._file, data)
            self._num_written += count
            data = data[count:]
        return not is_last
