"""How long a step takes: a fixed part and one for each token, learnt from the answers of all workers together.

One worker alone decodes the same number of sequences step after step, from which the two parts cannot be told apart;
of all workers together some always compute prompts. How much slower than the others one of them is, is its own figure.
"""

import math

PRIOR_TOKENS_PER_SECOND = 10_000
# In tokens squared: of steps that differ by fewer tokens than this, what they say of a token's time counts little.
PRIOR_VARIANCE = 16.0**2
NUM_REMEMBERED = 512  # steps
MAX_OFF = 8.0  # a step that took so many times what was expected says something of that moment, not of steps


class StepTimes:
    """A regression that forgets, and leans on a prior until steps of different sizes were seen."""

    def __init__(self) -> None:
        self.fixed = 0.0
        """Seconds of a step."""
        self.per_token = self._prior = 1 / PRIOR_TOKENS_PER_SECOND
        """Seconds of each of its tokens."""
        self._num_seen = 0
        self._tokens = self._seconds = self._squares = self._products = 0.0  # means

    def expect(self, tokens_per_second: int) -> None:
        """Take a worker's own measurement as the prior, while there are no others."""
        if not self._num_seen and tokens_per_second:
            self.per_token = self._prior = 1 / tokens_per_second

    def seconds(self, num_tokens: int) -> float:
        return self.fixed + self.per_token * num_tokens

    def observe(self, num_tokens: int, seconds: float) -> float:
        """Learn from a step; returns how many times the expected time it took."""
        expected = self.seconds(num_tokens)
        ratio = seconds / expected
        if self._num_seen and ratio > MAX_OFF:
            ratio, seconds = MAX_OFF, MAX_OFF * expected
        if self._num_seen < NUM_REMEMBERED:
            self._num_seen += 1
        weight = 1 / self._num_seen
        self._tokens += weight * (num_tokens - self._tokens)
        self._seconds += weight * (seconds - self._seconds)
        self._squares += weight * (num_tokens * num_tokens - self._squares)
        self._products += weight * (num_tokens * seconds - self._products)
        variance = max(0.0, self._squares - self._tokens * self._tokens)
        covariance = self._products - self._tokens * self._seconds
        slope = (covariance + PRIOR_VARIANCE * self._prior) / (variance + PRIOR_VARIANCE)
        # Neither part is negative, and a token never costs so little that no cache would be worth anything.
        self.per_token = min(max(slope, self._prior / 100), self._seconds / self._tokens)
        self.fixed = self._seconds - self.per_token * self._tokens
        return ratio


class Slowness:
    """How many times slower than its fleet a worker is: a geometric mean, which one stalled step moves little.

    It begins as if one usual step had been seen, so that a few slow ones at the start of a session tell.
    """

    NUM_REMEMBERED = 16  # steps
    NOISE = 1.25  # what differs by less than this counts as equally fast

    def __init__(self) -> None:
        self._log = 0.0
        self._num_seen = 1
        self.speed = 1000
        """Speed of the worker, where 1,000 is its fleet's: whole, so that sums of it are exact."""

    def observe(self, ratio: float) -> None:
        self._num_seen = min(self._num_seen + 1, self.NUM_REMEMBERED)
        self._log += (math.log(ratio) - self._log) / self._num_seen
        slowness = math.exp(self._log)
        is_usual = 1 / self.NOISE < slowness < self.NOISE
        self.speed = 1000 if is_usual else max(1, round(1000 / slowness))
