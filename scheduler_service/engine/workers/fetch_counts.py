"""Adapters that a worker was brought, their bytes, and the seconds that it took."""

from dataclasses import dataclass


@dataclass(slots=True)
class FetchCounts:
    """Counts of one worker."""

    num_adapters: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
