"""How many tokens each output of a request has gained here, and when: what a client waited for."""

import time
from collections.abc import Sequence

from scheduler_service.statistics.counts import RequestCounts


class TokenTimes:
    """Times are seconds of the monotonic clock. `num_tokens` of each output begins with those of an earlier stream."""

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
        """Seconds from the arrival to the first token of any output."""
        self.longest_pause_seconds = 0.0
        self._counts = counts
        self._num_earlier = sum(num_tokens)
        self._first_at = [0.0] * len(num_tokens)  # of each output, 0 before this server's first
        self._last_at = [0.0] * len(num_tokens)

    def count(self, index: int, now: float) -> int:
        """An output gained a token; returns how many it has."""
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
        """When any output gained its last token so far, since the arrival; 0 or less if none has."""
        return max(self._last_at) - self.arrived_at

    @property
    def num_pauses(self) -> int:
        """Between two tokens of one output; those before a broken stream was resumed are not counted."""
        return sum(self.num_tokens) - self._num_earlier - sum(at > 0 for at in self._first_at)

    @property
    def mean_pause_seconds(self) -> float | None:
        """None before the first pause."""
        return (sum(self._last_at) - sum(self._first_at)) / self.num_pauses if self.num_pauses else None
