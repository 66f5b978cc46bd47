"""What was chosen for a group: which worker takes it, for which reason, and what was compared."""

import enum
from typing import NamedTuple

from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.placement.worker import WorkerScheduler


class PlacementReason(enum.Enum):
    """Why a worker took a group, or left it to another one."""

    ALONE = enum.auto()
    """No other worker had room."""
    LOAD = enum.auto()
    """It is done sooner there, by what the workers have to do and how fast they are."""
    AFFINITY = enum.auto()
    """It is done sooner there, because more of it is cached there, or its adapter is."""
    SHARE = enum.auto()
    """Another worker has less to do, and will find enough that waits."""
    OVERDUE = enum.auto()
    """It has been left, or overtaken, for long enough."""
    ROOM = enum.auto()
    """It was left because another worker has room for it."""
    SUSPECT = enum.auto()
    """Workers may be lost to it, so it went where there is least to lose."""


class Placement(NamedTuple):
    """One choice: a group was taken by the worker whose step it is in, or left `to` another one.

    Seconds are those that it was expected to take here and there, 0 without a comparison; tokens those that are cached.
    """

    group: SequenceGroup
    reason: PlacementReason
    seconds: float = 0.0
    cached_tokens: int = 0
    to: WorkerScheduler | None = None
    seconds_there: float = 0.0
    cached_tokens_there: int = 0
    num_overtaken: int = 0
