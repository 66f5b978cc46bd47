"""Shows the progress of loading: a progress bar on a terminal, or log lines."""

import sys
import time
from typing import Never, Self

import structlog
from tqdm import tqdm

log = structlog.get_logger()

LOG_SECONDS = 5.0
"""Seconds between two log lines."""


def stage(name: str) -> None:
    log.info("loading", stage=name)


class Progress:
    """A context that shows progress. `update` is called with the bytes or items done since the last call."""

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
        """Start again from zero."""
        self._done, self._total = 0, total
        if self._bar is not None:
            self._bar.reset(total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def byte_progress(what: str, num_bytes: int | None = None) -> Progress:
    """Counts bytes. An unknown total is set later by `reset`."""
    return Progress(what, num_bytes, "B")


def count_progress(what: str, count: int) -> Progress:
    return Progress(what, count, "it")
