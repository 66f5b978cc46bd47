"""Number, bytes and seconds of the adapters sent to a worker."""

from dataclasses import dataclass


@dataclass(slots=True)
class FetchCounts:
    """Counts of one worker's adapter deliveries."""

    num_adapters: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
