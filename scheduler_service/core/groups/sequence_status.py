"""Where a sequence stands."""

import enum


class SequenceStatus(enum.Enum):
    """In a queue, on a worker, or ended, and how."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()
    """Its request cannot be served: it is too large."""
    FINISHED_FAILED = enum.auto()
    """The model's output was not finite, so no token could be chosen."""
    FINISHED_BARRED = enum.auto()
    """The request's parameters or its form allow no further token."""

    is_finished: bool
    """An attribute, because it is asked several times for every sequence and step."""
    has_failed: bool
    """Whether no token could be chosen."""


for _status in SequenceStatus:
    _status.is_finished = _status.name.startswith("FINISHED")
    _status.has_failed = _status in (SequenceStatus.FINISHED_FAILED, SequenceStatus.FINISHED_BARRED)
