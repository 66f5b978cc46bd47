"""Estimates the duration of a step: a fixed part and a part for each token, learnt from the answers of all workers.

A single worker may decode the same number of sequences in every step. If all steps have the same size, the fixed part
cannot be told from the part for each token. In a fleet, some workers always compute prompts, so the sizes of steps
differ. `Slowness` compares the speed of a single worker with the fleet.
"""

import math

PRIOR_TOKENS_PER_SECOND = 10_000
# Weight of the prior, in tokens squared. While the variance of step sizes is smaller than this weight, steps hardly
# change the estimated time of a token.
PRIOR_VARIANCE = 16.0**2
NUM_REMEMBERED = 512  # Number of steps that the means of `StepTimes` remember.
# Maximum time of a step that is learnt from, as a multiple of the expected time; slower steps are stalls.
MAX_OFF = 8.0


class StepTimes:
    """A linear regression of a step's seconds on its tokens, with decaying weights. A prior dominates until steps of
    different sizes were observed."""

    def __init__(self) -> None:
        self.fixed = 0.0
        """Seconds of a step without tokens."""
        self.per_token = self._prior = 1 / PRIOR_TOKENS_PER_SECOND
        """Seconds that each token adds to a step."""
        self._num_seen = 0
        self._tokens = self._seconds = self._squares = self._products = 0.0  # means over the remembered steps

    def expect(self, tokens_per_second: int) -> None:
        """Use the speed that a worker measured as the prior, if no step was observed yet."""
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
        # Neither part is negative. The estimated time of a token is at least 1 % of the prior, so that cached tokens
        # always count as saved time.
        self.per_token = min(max(slope, self._prior / 100), self._seconds / self._tokens)
        self.fixed = self._seconds - self.per_token * self._tokens
        return ratio


class Slowness:
    """How many times slower than the fleet a worker is: a geometric mean, which a single stalled step hardly changes.

    The mean begins with one assumed step of usual speed, so that a few slow steps at the start of a session count.
    """

    NUM_REMEMBERED = 16  # Number of steps that the geometric mean remembers.
    NOISE = 1.25  # A worker whose speed differs from the fleet's by less than this factor counts as equally fast.

    def __init__(self) -> None:
        self._log = 0.0
        self._num_seen = 1
        self.speed = 1000
        """Speed of the worker, relative to 1,000 for the fleet. The speed is a whole number, so that sums of speeds are
        exact."""

    def observe(self, ratio: float) -> None:
        self._num_seen = min(self._num_seen + 1, self.NUM_REMEMBERED)
        self._log += (math.log(ratio) - self._log) / self._num_seen
        slowness = math.exp(self._log)
        is_usual = 1 / self.NOISE < slowness < self.NOISE
        self.speed = 1000 if is_usual else max(1, round(1000 / slowness))
