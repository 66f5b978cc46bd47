"""Shows the progress of loading a model: a progress bar on a terminal, or a log line every few seconds."""

import sys
import time
from typing import Never, Self

import structlog
from tqdm import tqdm

log = structlog.get_logger()

LOG_SECONDS = 5.0
"""Seconds between two log lines that show progress."""


def stage(name: str) -> None:
    """Log the name of the stage of loading that begins."""
    log.info("loading", stage=name)


class Progress:
    """A context that shows progress. The caller calls `update` with the number of bytes or items that were done since
    the last call.
    """

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self._what, self._total, self._done = what, total, 0
        self._bar: tqdm[Never] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(desc=what, total=total, unit=unit, unit_scale=unit == "B", unit_divisor=1024)
        self._due = time.monotonic() + LOG_SECONDS

    def update(self, done: int = 1) -> None:
        self._done += done
        if self._bar is not None:
            self._bar.update(done)
        elif (now := time.monotonic()) >= self._due:
            self._due = now + LOG_SECONDS
            log.info("loading", stage=self._what, done=self._done, total=self._total)

    def reset(self, total: int) -> None:
        """Start again from zero, with a new total number."""
        self._done, self._total = 0, total
        if self._bar is not None:
            self._bar.reset(total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def byte_progress(what: str, num_bytes: int | None = None) -> Progress:
    """A `Progress` that counts bytes. If the total `num_bytes` is not known yet, `reset` sets it later."""
    return Progress(what, num_bytes, "B")


def count_progress(what: str, count: int) -> Progress:
    """A `Progress` that counts items."""
    return Progress(what, count, "it")
