"""Limits the refused calls of each API key: the engine counts no call that a front end refuses before admission.

Each front end counts for itself, so a key may have as many refused calls a minute as requests, at each front end.
"""

import grpc

from pagewire_common.calls.errors import RequestError
from scheduler_service.access.bucket import Bucket
from scheduler_service.access.keys import ApiKey


class Refusals:
    """The refused calls of each key. `now`: seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}

    def check(self, key: ApiKey | None, now: float) -> None:
        """Raises RESOURCE_EXHAUSTED if the key's latest calls were refused as often as it may send requests."""
        if (seconds := self._missing(key, now)) > 0 and key is not None:
            reason = f"too many calls with this API key were refused; it may send {key.requests_per_minute} a minute"
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{reason}; try again in {seconds:.1f} s")

    def count(self, key: ApiKey | None, now: float) -> None:
        """Count a call that was refused. A call that `check` refused does not count, because it was not read."""
        if key is not None and key.requests_per_minute is not None:
            bucket = self._buckets.setdefault(key.id, Bucket())
            if not self._missing(key, now):
                bucket.use(1)

    def _missing(self, key: ApiKey | None, now: float) -> float:
        bucket = None if key is None else self._buckets.get(key.id)
        if bucket is None or key is None or key.requests_per_minute is None:
            return 0.0
        return bucket.missing(key.requests_per_minute, now)
