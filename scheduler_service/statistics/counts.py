"""What has happened since the scheduler started, in plain numbers that cost next to nothing to count.

AdminService reads them, and a scrape of the metrics turns them into text; this file knows of neither. The engine counts
for itself; what a front end has counted comes to the engine when a scrape asks.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.v1.engine_service_pb2 import FrontendStatistics

# In seconds. The first and last bounds are those of vLLM's metrics of the same name, so that dashboards fit; for the
# time between tokens there are three more at the beginning, for small models.
FIRST_TOKEN_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TOKEN_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip

# In tokens: 1, 2, 5, 10 … a million.
LENGTH_BOUNDS = (*(float(first * 10**power) for power in range(6) for first in (1, 2, 5)), 1e6)
MOST_TENANTS = 64
OTHER_TENANTS = "(others)"


class Histogram:
    """Counts of values up to each bound, and beyond the last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value; 0.2 µs."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add what another histogram of the same bounds has counted."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, counts, strict=True)]
        self.total += total


class Statistics:
    """Counts of the engine, over all workers."""

    def __init__(self) -> None:
        self.start_time_ms = time.time_ns() // 1_000_000
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.queue_seconds = Histogram(REQUEST_BOUNDS)
        self.tenants: dict[str, TenantCounts] = {}

    def finished(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count a request of a tenant. After the first tenants, further ones are counted together: names of tenants
        may come from clients, and each would be a label for ever.
        """
        if tenant not in self.tenants and len(self.tenants) >= MOST_TENANTS:
            tenant = OTHER_TENANTS
        counts = self.tenants.setdefault(tenant, TenantCounts())
        counts.num_requests += 1
        counts.num_prompt_tokens += num_prompt_tokens
        counts.num_output_tokens += num_output_tokens


@dataclass(slots=True)
class TenantCounts:
    """Of requests that are over."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class FrontendCounts:
    """Counts and durations of the requests of one front end, or of several together."""

    def __init__(self) -> None:
        self.num_outputs: Counter[str] = Counter()
        """Outputs that ended, by reason: stop, length, abort or error."""
        self.first_token_seconds = Histogram(FIRST_TOKEN_BOUNDS)
        self.token_seconds = Histogram(TOKEN_BOUNDS)
        """Between two tokens of an output."""
        self.request_seconds = Histogram(REQUEST_BOUNDS)
        self.prompt_tokens = Histogram(LENGTH_BOUNDS)
        self.output_tokens = Histogram(LENGTH_BOUNDS)

    def add(self, other: "FrontendCounts") -> None:
        self.num_outputs.update(other.num_outputs)
        for name in _HISTOGRAMS:
            theirs = getattr(other, name)
            getattr(self, name).add(theirs.counts, theirs.total)

    def encode(self) -> FrontendStatistics:
        message = FrontendStatistics(num_outputs=self.num_outputs)
        for name in _HISTOGRAMS:
            histogram = getattr(self, name)
            getattr(message, name).counts.extend(histogram.counts)
            getattr(message, name).total = histogram.total
        return message

    @classmethod
    def decode(cls, message: FrontendStatistics) -> "FrontendCounts":
        """Raises ValueError when the bounds cannot be the same."""
        counts = cls()
        counts.num_outputs.update(message.num_outputs)
        for name in _HISTOGRAMS:
            histogram = getattr(message, name)
            getattr(counts, name).add(histogram.counts, histogram.total)
        return counts


_HISTOGRAMS = ("first_token_seconds", "token_seconds", "request_seconds", "prompt_tokens", "output_tokens")
