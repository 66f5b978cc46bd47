"""The states of a sequence."""

import enum


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()
    """The request is too large to be served."""
    FINISHED_FAILED = enum.auto()
    """The logits were not finite, so no token could be chosen."""
    FINISHED_BARRED = enum.auto()
    """The parameters or the output form allow no further token."""

    is_finished: bool
    """An attribute and not a property: every step reads it several times for every sequence."""
    has_failed: bool


for _status in SequenceStatus:
    _status.is_finished = _status.name.startswith("FINISHED")
    _status.has_failed = _status in (SequenceStatus.FINISHED_FAILED, SequenceStatus.FINISHED_BARRED)
