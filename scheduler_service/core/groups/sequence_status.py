"""The states of a sequence."""

import enum


class SequenceStatus(enum.Enum):
    """Whether a sequence is in a queue, is on a worker, or has ended, and why it has ended."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()
    """The request is too large to be served."""
    FINISHED_FAILED = enum.auto()
    """The model's logits were not finite, so no token could be chosen."""
    FINISHED_BARRED = enum.auto()
    """The request's parameters or its output form allow no further token."""

    is_finished: bool
    """Whether the sequence has ended. The value is an attribute and not a property, because every step reads it several
    times for every sequence."""
    has_failed: bool
    """Whether the sequence ended because no token could be chosen."""


for _status in SequenceStatus:
    _status.is_finished = _status.name.startswith("FINISHED")
    _status.has_failed = _status in (SequenceStatus.FINISHED_FAILED, SequenceStatus.FINISHED_BARRED)
