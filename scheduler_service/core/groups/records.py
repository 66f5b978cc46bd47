"""Records about a request while it is served: for its placement, and for its client."""

from dataclasses import dataclass, field
from typing import NamedTuple


class PrefixWait(NamedTuple):
    first: int
    """Index of the group's first block that is not cached there yet."""
    until: float


@dataclass(slots=True)
class PlacementRecord:
    """Limits of a group's wait for a better worker. Times are seconds of the scheduler's clock."""

    num_overtaken: int = 0
    """Later groups that were taken first."""
    left_until: float | None = None
    """Time until which workers may leave the group to a better worker; None if none has."""
    prefix_waits: dict[str, PrefixWait] = field(default_factory=dict)
    """Waits on each worker, by name."""
    swapped_at: float = 0.0
    num_moves: int = 0
    """Moves to another worker after a swap."""
    reason: str = ""
    """Name of the `PlacementReason` of the last admission."""


@dataclass(slots=True)
class History:
    """A group's preemptions and workers, as reported to its client."""

    num_cached_tokens: int | None = None
    """Tokens of the prompt that were cached at the first admission."""
    num_recomputes: int = 0
    """Preemptions by recompute, including `num_losses`."""
    num_losses: int = 0
    """Returns to the queue because the worker was lost or drained, which are no preemptions of the worker."""
    num_swaps: int = 0
    worker: str | None = None
    """Name of the worker that took the group last."""
    num_worker_changes: int = 0
