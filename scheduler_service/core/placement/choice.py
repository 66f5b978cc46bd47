"""Offers of workers for a group, and the choice of a worker with its reason."""

import enum
import sys
from typing import NamedTuple

from scheduler_service.core.groups.sequence import SequenceGroup
from scheduler_service.core.placement.worker import Member, WorkerScheduler

LAST = sys.maxsize
"""Value of `Offer.order` for an offer that goes after all other offers."""


class Here(enum.Enum):
    """Whether the worker that asks the balancer can take the group."""

    HAS_ROOM = enum.auto()
    IS_FULL = enum.auto()
    LACKS_ADAPTER = enum.auto()
    """The worker can take the group after the group's adapter was fetched."""


class Offer(NamedTuple):
    """One worker's estimate of when it would have computed a group's tokens. The offer with the fewest seconds is the
    best."""

    seconds: float
    """Seconds until the group's tokens would be computed on the worker."""
    order: int
    """Order of offers with equal seconds: the worker whose work last changed longest ago goes first."""
    member: Member
    cached_tokens: int
    """Tokens of the group that are cached on the worker, or are being computed there."""
    lacks_adapter: bool = False
    """Whether `seconds` includes the time to fetch the group's adapter."""


class PlacementReason(enum.Enum):
    """The reason why a worker took a group, or left it to another worker."""

    ALONE = enum.auto()
    """No other worker had room."""
    LOAD = enum.auto()
    """The chosen worker finishes the group sooner, because it has less work or a higher speed."""
    AFFINITY = enum.auto()
    """The chosen worker finishes the group sooner, because it has the group's adapter or more of its prefix."""
    SHARE = enum.auto()
    """This worker takes its share of the waiting groups; another worker with less work will find enough other
    groups."""
    OVERDUE = enum.auto()
    """The group was left in the queue for its maximum time, or was overtaken MAX_OVERTAKES times."""
    ROOM = enum.auto()
    """This worker has no room, and another worker has room."""
    SUSPECT = enum.auto()
    """The group may cause the loss of workers, so the rules for suspects chose the worker."""


class Placement(NamedTuple):
    """One choice: a group was taken by the worker whose step contains it, or was left `to` another worker.

    `seconds` is the expected time until this worker would finish the group, and `seconds_there` the same time for the
    other worker. `seconds` and `seconds_there` are 0 if no two workers were compared. `cached_tokens` and
    `cached_tokens_there` count the group's cached tokens on this worker and on the other worker.
    """

    group: SequenceGroup
    reason: PlacementReason
    seconds: float = 0.0
    cached_tokens: int = 0
    to: WorkerScheduler | None = None
    seconds_there: float = 0.0
    cached_tokens_there: int = 0
    num_overtaken: int = 0
