"""Estimates the duration of a step: a fixed part and a part for each token, learnt from all workers' answers.

A single worker's steps may all have the same size, which cannot tell the parts apart. In a fleet, some workers always
compute prompts.
"""

import math

PRIOR_TOKENS_PER_SECOND = 10_000
# Weight of the prior, in tokens squared, compared with the variance of step sizes.
PRIOR_VARIANCE = 16.0**2
NUM_REMEMBERED = 512  # steps that the means of `StepTimes` remember
# Longest learnt time of a step, as a multiple of the expected time; slower steps are stalls.
MAX_OFF = 8.0


class StepTimes:
    """A linear regression of seconds on tokens, with decaying weights and a prior."""

    def __init__(self) -> None:
        self.fixed = 0.0
        """Seconds of a step without tokens."""
        self.per_token = self._prior = 1 / PRIOR_TOKENS_PER_SECOND
        """Seconds that each token adds."""
        self._num_seen = 0
        self._tokens = self._seconds = self._squares = self._products = 0.0  # means over the remembered steps

    def expect(self, tokens_per_second: int) -> None:
        """Use a worker's measured speed as the prior, before any step was observed."""
        if not self._num_seen and tokens_per_second:
            self.per_token = self._prior = 1 / tokens_per_second

    def seconds(self, num_tokens: int) -> float:
        return self.fixed + self.per_token * num_tokens

    def observe(self, num_tokens: int, seconds: float) -> float:
        """Learn from a step. Returns the step's time as a multiple of the expected time."""
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
        # A token takes at least 1 % of the prior, so that cached tokens always save time. Neither part is negative.
        self.per_token = min(max(slope, self._prior / 100), self._seconds / self._tokens)
        self.fixed = self._seconds - self.per_token * self._tokens
        return ratio


class Slowness:
    """How many times slower than the fleet a worker is: a geometric mean, which one stalled step hardly changes. The
    mean begins with one assumed step of usual speed."""

    NUM_REMEMBERED = 16  # steps that the geometric mean remembers
    NOISE = 1.25  # workers within this factor count as equally fast

    def __init__(self) -> None:
        self._log = 0.0
        self._num_seen = 1
        self.speed = 1000
        """1,000 for the fleet's speed; a whole number, so that sums are exact."""

    def observe(self, ratio: float) -> None:
        self._num_seen = min(self._num_seen + 1, self.NUM_REMEMBERED)
        self._log += (math.log(ratio) - self._log) / self._num_seen
        slowness = math.exp(self._log)
        is_usual = 1 / self.NOISE < slowness < self.NOISE
        self.speed = 1000 if is_usual else max(1, round(1000 / slowness))
