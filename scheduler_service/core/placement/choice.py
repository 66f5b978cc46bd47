"""Offers of workers for a group, and the choice of a worker with its reason."""

import enum
import sys
from typing import NamedTuple

from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.placement.worker import Member, WorkerScheduler

LAST = sys.maxsize
"""Value of `Offer.order` for an offer that goes after all others."""


class Here(enum.Enum):
    """Whether the worker that asks can take the group."""

    HAS_ROOM = enum.auto()
    IS_FULL = enum.auto()
    LACKS_ADAPTER = enum.auto()
    """The worker can take the group once the adapter is fetched."""


class Offer(NamedTuple):
    seconds: float
    """Seconds until the group's tokens would be computed on the worker. The fewest are the best."""
    order: int
    """Order of offers with equal seconds: the worker whose work last changed longest ago goes first."""
    member: Member
    cached_tokens: int
    """Tokens of the group that are cached on the worker, or are being computed there."""
    lacks_adapter: bool = False
    """Whether `seconds` includes the time to fetch the adapter."""


class PlacementReason(enum.Enum):
    """Why a worker took a group, or left it to another worker."""

    ALONE = enum.auto()
    """No other worker had room."""
    LOAD = enum.auto()
    """The chosen worker has less work or a higher speed."""
    AFFINITY = enum.auto()
    """The chosen worker has the group's adapter or more of its prefix."""
    SHARE = enum.auto()
    """This worker takes its share; another worker with less work will find enough other groups."""
    OVERDUE = enum.auto()
    """The group was left for its maximum time, or overtaken MAX_OVERTAKES times."""
    ROOM = enum.auto()
    """Only the other worker has room."""
    SUSPECT = enum.auto()
    """The group is a suspect."""


class Placement(NamedTuple):
    """One choice: a worker takes a group, or leaves it `to` another worker.

    `seconds` until this worker would finish the group, and `seconds_there` for the other worker, are 0 if no two
    workers were compared.
    """

    group: SequenceGroup
    reason: PlacementReason
    seconds: float = 0.0
    cached_tokens: int = 0
    to: WorkerScheduler | None = None
    seconds_there: float = 0.0
    cached_tokens_there: int = 0
    num_overtaken: int = 0
