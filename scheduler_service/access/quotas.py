"""Limits the usage of each API key: requests and tokens a minute, and requests in flight.

Quotas are token buckets with room for a minute. Prompt tokens are subtracted when the request is queued, output tokens
when the call ends: a request may overdraw its bucket, and the next are then refused.
"""

from dataclasses import dataclass, field

import grpc

from pagewire_common.calls.errors import RequestError
from scheduler_service.access.keys import ApiKey, Keyring


class Bucket:
    """A token bucket of one minute's quota. A new bucket is full."""

    def __init__(self) -> None:
        self._used = 0.0
        self._at = 0.0

    def used(self, per_minute: int, now: float) -> float:
        """The used part of the quota, which falls by `per_minute` / 60 a second."""
        self._used = max(0.0, self._used - (now - self._at) * per_minute / 60)
        self._at = now
        return self._used

    def missing(self, per_minute: int, now: float) -> float:
        """Seconds until a request or token of the quota is free; 0 if one is free now."""
        return max(0.0, (self.used(per_minute, now) + 1 - per_minute) * 60 / per_minute)

    def use(self, number: int) -> None:
        self._used += number


@dataclass(slots=True)
class _Use:
    key: ApiKey
    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    num_in_flight: int = 0

    def is_over(self, now: float) -> bool:
        """Whether the key has no requests in flight, and all its buckets are full."""
        limits = (self.requests, self.key.requests_per_minute), (self.tokens, self.key.tokens_per_minute)
        return not self.num_in_flight and not any(most is not None and one.used(most, now) for one, most in limits)


class Quotas:
    """Counts the usage of each API key. A removed key, which may be added again, is kept until its buckets are full."""

    def __init__(self, keyring: Keyring | None) -> None:
        self._keyring = keyring
        self._uses: dict[str, _Use] = {}

    def set_keys(self, keyring: Keyring, now: float) -> None:
        self._keyring = keyring
        for key_id, use in [*self._uses.items()]:
            use.key = keyring.by_id.get(key_id, use.key)
            if key_id not in keyring.by_id and use.is_over(now):
                del self._uses[key_id]

    def admit(self, key_id: str, now: float, *, is_request: bool, takes_place: bool = False) -> None:
        """Check and count a call. With `is_request` it is in flight until `leave`; `takes_place` of an older call
        allows one more.

        Raises RESOURCE_EXHAUSTED, or UNAUTHENTICATED for a removed key.
        """
        if self._keyring is None:
            return
        if (key := self._keyring.by_id.get(key_id)) is None:
            raise RequestError(grpc.StatusCode.UNAUTHENTICATED, "the API key is not known any more")
        use = self._uses.setdefault(key_id, _Use(key))
        self._check(key, use, now, has_place=takes_place or not is_request)
        if key.requests_per_minute is not None:
            use.requests.use(1)
        use.num_in_flight += is_request

    def _check(self, key: ApiKey, use: _Use, now: float, *, has_place: bool) -> None:
        if not has_place and key.concurrency is not None and use.num_in_flight >= key.concurrency:
            _refuse(f"this API key has {use.num_in_flight} requests in flight, as many as it may; try again later")
        for bucket, most, what in (
            (use.requests, key.requests_per_minute, "requests"),
            (use.tokens, key.tokens_per_minute, "tokens"),
        ):
            if most is not None and (seconds := bucket.missing(most, now)) > 0:
                _refuse(f"this API key has used its {most} {what} a minute; try again in {seconds:.1f} s")

    def use_tokens(self, key_id: str, number: int) -> None:
        """Count tokens. A key without a token limit has a full bucket if it receives a limit later."""
        if (use := self._uses.get(key_id)) is not None and use.key.tokens_per_minute is not None:
            use.tokens.use(number)

    def leave(self, key_id: str) -> None:
        if (use := self._uses.get(key_id)) is not None and use.num_in_flight:
            use.num_in_flight -= 1


def _refuse(reason: str) -> None:
    raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
