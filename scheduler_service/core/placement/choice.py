"""Offers of workers for a group, and the choice among them: which worker takes it, and for which reason."""

import enum
import sys
from typing import NamedTuple

from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.placement.worker import Member, WorkerScheduler

LAST = sys.maxsize
"""An offer's order behind all others."""


class Here(enum.Enum):
    """Whether the worker that asks could take the group itself."""

    HAS_ROOM = enum.auto()
    IS_FULL = enum.auto()
    LACKS_ADAPTER = enum.auto()
    """Only after the group's adapter was brought to it."""


class Offer(NamedTuple):
    """One worker's estimate for a group. The offer of the fewest seconds is the best."""

    seconds: float
    """Seconds until the group's tokens would be computed there."""
    order: int
    """Among equals the worker goes first that has had nothing new for longer."""
    member: Member
    cached_tokens: int
    """Tokens of the group that are cached there, or are being computed."""
    lacks_adapter: bool = False
    """Whether `seconds` have those that bringing the group's adapter takes."""


class PlacementReason(enum.Enum):
    """Why a worker took a group, or left it to another one."""

    ALONE = enum.auto()
    """No other worker had room."""
    LOAD = enum.auto()
    """The group is done sooner there, by what the workers have to do and how fast they are."""
    AFFINITY = enum.auto()
    """The group is done sooner there, because more of it is cached there, or its adapter is."""
    SHARE = enum.auto()
    """Another worker has less to do, and will find enough that waits."""
    OVERDUE = enum.auto()
    """The group has been left, or overtaken, for long enough."""
    ROOM = enum.auto()
    """The group was left because another worker has room for it."""
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
