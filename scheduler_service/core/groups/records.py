"""Notes on a request while it is served: for the placement of its group, and for its client."""

from dataclasses import dataclass, field
from typing import NamedTuple


class PrefixWait(NamedTuple):
    """How long a waiting group waits for a prefix that other groups are computing on one worker."""

    first: int
    """The number of the group's first block that is not yet in that worker's prefix cache."""
    until: float


@dataclass(slots=True)
class PlacementRecord:
    """Bounds of how long a group waits for a better worker; times are in seconds of the scheduler's clock."""

    num_overtaken: int = 0
    """Later groups that were taken before this one while it waited."""
    left_until: float | None = None
    """The time until which a worker may leave the waiting group to a better worker; None if none has left it."""
    prefix_waits: dict[str, PrefixWait] = field(default_factory=dict)
    """Its waits for a prefix, by the worker's name."""
    swapped_at: float = 0.0
    """The time when the group was last swapped out."""
    num_moves: int = 0
    """How often the group was swapped out and continued on another worker."""


@dataclass(slots=True)
class History:
    """A group's preemptions and workers so far, of which its client is told."""

    num_cached_tokens: int | None = None
    """Tokens of the prompt that were found in the prefix cache at the first admission; None before that."""
    num_recomputes: int = 0
    """Preemptions after which its tokens are computed again; the loss of its worker counts as one."""
    num_swaps: int = 0
    """Preemptions by swapping out."""
    worker: str | None = None
    """The name of the worker that took the group last."""
    num_worker_changes: int = 0
    """How often another worker took the group than the time before."""
