"""Records about a request while it is served: for the placement of its group, and for its client."""

from dataclasses import dataclass, field
from typing import NamedTuple


class PrefixWait(NamedTuple):
    """The wait of a group for a prefix that other groups compute on one worker."""

    first: int
    """Number of the group's first block that is not in that worker's prefix cache yet."""
    until: float


@dataclass(slots=True)
class PlacementRecord:
    """Limits of a group's wait for a better worker. Times are in seconds of the scheduler's clock."""

    num_overtaken: int = 0
    """Number of later groups that were taken before this group while it waited."""
    left_until: float | None = None
    """Time until which a worker may leave the group to a better worker; None if no worker has left the group."""
    prefix_waits: dict[str, PrefixWait] = field(default_factory=dict)
    """The group's waits for a prefix, by the worker's name."""
    swapped_at: float = 0.0
    """The time when the group was last swapped out."""
    num_moves: int = 0
    """Number of moves to another worker after the group was swapped out."""


@dataclass(slots=True)
class History:
    """A group's preemptions and workers so far, as reported to its client."""

    num_cached_tokens: int | None = None
    """Tokens of the prompt that were in the prefix cache at the first admission; None before the first admission."""
    num_recomputes: int = 0
    """Number of preemptions by recompute. The loss of a worker counts as a preemption."""
    num_swaps: int = 0
    """Number of preemptions by swap."""
    worker: str | None = None
    """Name of the worker that took the group last."""
    num_worker_changes: int = 0
    """How often the group was taken by another worker than the time before."""
