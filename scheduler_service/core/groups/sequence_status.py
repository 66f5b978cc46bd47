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
    """Its request cannot be served, by its own doing: it is too large, or allows no token."""

    is_finished: bool
    """An attribute, because it is asked several times for every sequence and step."""


for _status in SequenceStatus:
    _status.is_finished = _status.name.startswith("FINISHED")
