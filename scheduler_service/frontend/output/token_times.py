"""Counts the new tokens of each output of a request, and records their times."""

import time
from collections.abc import Sequence

from scheduler_service.statistics.counts import RequestCounts


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
        self._first_at = [0.0] * len(num_tokens)  # when each output's first new token arrived; 0 before it
        self._last_at = [0.0] * len(num_tokens)

    def count(self, index: int, now: float) -> int:
        """Count a new token of an output. Returns the number of tokens that the output has now."""
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
        """Seconds from the request's arrival to the latest token of any output; 0 or less before the first token."""
        return max(self._last_at) - self.arrived_at

    @property
    def num_pauses(self) -> int:
        """Number of pauses between consecutive new tokens of an output, summed over outputs.

        Tokens of a broken stream do not count.
        """
        return sum(self.num_tokens) - self._num_earlier - sum(at > 0 for at in self._first_at)

    @property
    def mean_pause_seconds(self) -> float | None:
        """Mean pause between consecutive new tokens of an output, in seconds; None if no output has two new tokens."""
        return (sum(self._last_at) - sum(self._first_at)) / self.num_pauses if self.num_pauses else None
