"""Counts of the adapters that were sent to a worker: number, bytes and seconds."""

from dataclasses import dataclass


@dataclass(slots=True)
class FetchCounts:
    """Counts of one worker's adapter deliveries."""

    num_adapters: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
