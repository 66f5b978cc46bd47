"""The requests that ended last, for operators, limited in number and bytes, because clients choose ids and tenants."""

import time
from collections import deque
from dataclasses import asdict, dataclass
from itertools import islice

from pagewire.v1 import admin_service_pb2 as admin_pb
from pagewire.v1 import inference_service_pb2 as pb

MAX_REQUESTS = 1000
MAX_BYTES = 1 << 20  # all serialized requests; a request takes about 120 bytes


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

    def encode(self) -> pb.RequestMetrics:
        return pb.RequestMetrics(**self.known())  # type: ignore[arg-type]


class FinishedRequests:
    """A store of finished requests, which drops the oldest when full. Adding takes O(1)."""

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
