"""Counts since the scheduler started, in plain numbers, and the requests that ended last.

The engine counts tokens, and front ends count requests.
"""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from pagewire.v1 import admin_service_pb2 as admin_pb
from pagewire.v1 import engine_service_pb2 as pb
from pagewire.v1 import inference_service_pb2 as inference_pb

# Bounds in seconds. The first and last bounds equal those of vLLM's metric with the same name, so that dashboards for
# vLLM show them. The time between tokens has three smaller bounds before them, for small models.
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

# Tokens: 1, 2, 5, 10 … a million.
LENGTH_BOUNDS = (*(float(first * 10**power) for power in range(6) for first in (1, 2, 5)), 1e6)
# vLLM's bounds.
STEP_BOUNDS = (1.0, *(float(8 << power) for power in range(12)))
CHOICE_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)
MAX_TENANTS = 32
OTHER_TENANTS = "(others)"
MAX_REQUESTS = 1000
"""Finished requests that are stored."""
MAX_BYTES = 1 << 20
"""Limit on the serialized finished requests; a request takes about 120 bytes."""


class Histogram:
    """Numbers of values above the previous bound and up to each bound; the last, of values above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Takes 0.2 µs."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, counts: Sequence[int], total: float) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, counts, strict=True)]
        self.total += total


class Statistics:
    def __init__(self) -> None:
        self.start_time_ms = time.time_ns() // 1_000_000
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0


class RequestCounts:
    """The counts and durations of one tenant's requests. All tenants after the first MAX_TENANTS share an object."""

    def __init__(self) -> None:
        self.num_outputs: Counter[str] = Counter()
        """Ended outputs by reason: stop, length, abort or error."""
        self.queue_seconds = Histogram(REQUEST_BOUNDS)
        self.first_token_seconds = Histogram(FIRST_TOKEN_BOUNDS)
        self.token_seconds = Histogram(TOKEN_BOUNDS)
        """Seconds between two consecutive tokens of an output."""
        self.request_seconds = Histogram(REQUEST_BOUNDS)
        self.prompt_tokens = Histogram(LENGTH_BOUNDS)
        self.output_tokens = Histogram(LENGTH_BOUNDS)
        # One value for each request that ended without being aborted.
        self.prefill_seconds = Histogram(REQUEST_BOUNDS)
        self.decode_seconds = Histogram(REQUEST_BOUNDS)
        self.inference_seconds = Histogram(REQUEST_BOUNDS)
        self.mean_token_seconds = Histogram(TOKEN_BOUNDS)
        self.params_n = Histogram(CHOICE_BOUNDS)
        self.params_max_tokens = Histogram(LENGTH_BOUNDS)
        # Sums over all requests that have ended for any reason.
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0

    def finished(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self.num_requests += 1
        self.num_prompt_tokens += num_prompt_tokens
        self.num_output_tokens += num_output_tokens

    def add(self, other: "RequestCounts") -> None:
        self.num_outputs.update(other.num_outputs)
        for name in _HISTOGRAMS:
            theirs = getattr(other, name)
            getattr(self, name).add(theirs.counts, theirs.total)
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def encode(self, tenant: str) -> pb.TenantStatistics:
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        message = pb.TenantStatistics(tenant=tenant, num_outputs=self.num_outputs, **numbers)
        for name in _HISTOGRAMS:
            histogram = getattr(self, name)
            getattr(message, name).counts.extend(histogram.counts)
            getattr(message, name).total = histogram.total
        return message

    @classmethod
    def decode(cls, message: pb.TenantStatistics) -> "RequestCounts":
        """Raises ValueError if a histogram has a wrong number of counts."""
        counts = cls()
        counts.num_outputs.update(message.num_outputs)
        for name in _HISTOGRAMS:
            histogram = getattr(message, name)
            getattr(counts, name).add(histogram.counts, histogram.total)
        for name in _NUMBERS:
            setattr(counts, name, getattr(message, name))
        return counts


_HISTOGRAMS = (
    "queue_seconds",
    "first_token_seconds",
    "token_seconds",
    "request_seconds",
    "prompt_tokens",
    "output_tokens",
    "prefill_seconds",
    "decode_seconds",
    "inference_seconds",
    "mean_token_seconds",
    "params_n",
    "params_max_tokens",
)
_NUMBERS = ("num_requests", "num_prompt_tokens", "num_output_tokens")


class CountsByTenant:
    """Counts by tenant, for the first MAX_TENANTS: clients may choose names, and each is a permanent label of metrics.

    Objects with the same `names` separate the same tenants, so their sums never decrease.
    """

    def __init__(self, names: set[str] | None = None) -> None:
        self._names: set[str] = set() if names is None else names
        self.tenants: dict[str, RequestCounts] = {}

    def of(self, tenant: str) -> RequestCounts:
        if tenant not in self._names:
            if len(self._names) < MAX_TENANTS:
                self._names.add(tenant)
            else:
                tenant = OTHER_TENANTS
        if (counts := self.tenants.get(tenant)) is None:
            counts = self.tenants[tenant] = RequestCounts()
        return counts

    @property
    def total(self) -> RequestCounts:
        total = RequestCounts()
        for counts in self.tenants.values():
            total.add(counts)
        return total

    def add(self, other: "CountsByTenant") -> None:
        for tenant, counts in other.tenants.items():
            self.of(tenant).add(counts)

    def encode(self) -> pb.FrontendStatistics:
        return pb.FrontendStatistics(tenants=[counts.encode(tenant) for tenant, counts in self.tenants.items()])

    @classmethod
    def decode(cls, message: pb.FrontendStatistics) -> "CountsByTenant":
        """Raises ValueError if a histogram has a wrong number of counts."""
        counts = cls()
        counts.tenants = {tenant.tenant: RequestCounts.decode(tenant) for tenant in message.tenants}
        return counts


class TokenTimes:
    """Counts the tokens of each output, and records when new tokens arrive, in seconds of the monotonic clock.

    `num_tokens` includes tokens of a broken stream that the request resumes.
    """

    __slots__ = (
        "_counts",
        "_first_at",
        "_last_at",
        "_num_earlier",
        "arrived_at",
        "first_token_seconds",
        "longest_pause_seconds",
        "num_tokens",
    )

    def __init__(self, counts: RequestCounts, num_tokens: Sequence[int]) -> None:
        self.arrived_at = time.monotonic()
        self.num_tokens = list(num_tokens)
        self.first_token_seconds: float | None = None
        """Seconds from the arrival of the request to the first token of any output."""
        self.longest_pause_seconds = 0.0
        self._counts = counts
        self._num_earlier = sum(num_tokens)
        self._first_at = [0.0] * len(num_tokens)  # 0 before the first new token
        self._last_at = [0.0] * len(num_tokens)

    def count(self, index: int, now: float) -> int:
        """Count a new token of an output. Returns its number of tokens."""
        num_tokens, last = self.num_tokens[index] + 1, self._last_at[index]
        self.num_tokens[index] = num_tokens
        self._last_at[index] = now
        if last:
            pause = now - last
            self._counts.token_seconds.observe(pause)
            if pause > self.longest_pause_seconds:
                self.longest_pause_seconds = pause
            return num_tokens
        self._first_at[index] = now
        if self.first_token_seconds is None:
            self.first_token_seconds = now - self.arrived_at
            self._counts.first_token_seconds.observe(self.first_token_seconds)
        return num_tokens

    @property
    def last_token_seconds(self) -> float:
        """Seconds from the request's arrival to its latest token; 0 or less before the first."""
        return max(self._last_at) - self.arrived_at

    @property
    def num_pauses(self) -> int:
        """Pauses between consecutive new tokens of an output, summed over outputs, without a broken stream's tokens."""
        return sum(self.num_tokens) - self._num_earlier - sum(at > 0 for at in self._first_at)

    @property
    def mean_pause_seconds(self) -> float | None:
        """Mean pause in seconds; None if no output has two new tokens."""
        return (sum(self._last_at) - sum(self._first_at)) / self.num_pauses if self.num_pauses else None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times and token counts of one finished request, as defined in inference_service.proto."""

    queued_seconds: float | None
    first_token_seconds: float | None
    mean_pause_seconds: float | None
    longest_pause_seconds: float | None
    total_seconds: float
    num_recompute_preemptions: int
    num_swap_preemptions: int
    num_worker_changes: int
    cached_tokens: int

    def known(self) -> dict[str, float | int]:
        """The known figures by name. Seconds are rounded to microseconds."""
        return {name: round(figure, 6) for name, figure in asdict(self).items() if figure is not None}

    def encode(self) -> inference_pb.RequestMetrics:
        return inference_pb.RequestMetrics(**self.known())  # type: ignore[arg-type]


class FinishedRequests:
    """The requests that ended last, limited in number and bytes, because clients choose ids and tenants.

    Adding takes O(1).
    """

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._num_bytes = 0
        # serialized, because bytes take little memory, and Python's cycle collector does not visit them
        self._requests: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def add(self, finished: admin_pb.FinishedRequest) -> None:
        finished.end_time_ms = time.time_ns() // 1_000_000
        request = finished.SerializeToString()
        self._requests.append(request)
        self._num_bytes += len(request)
        while len(self._requests) > self._max_requests or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._requests.popleft())

    def newest(self, limit: int) -> list[admin_pb.FinishedRequest]:
        return [admin_pb.FinishedRequest.FromString(request) for request in islice(reversed(self._requests), limit)]
