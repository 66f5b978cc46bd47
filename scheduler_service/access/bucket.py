"""A quota of one minute, as a token bucket."""


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
