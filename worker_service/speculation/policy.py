"""Chooses the number of drafts to verify in a step, so that the step gains the most tokens a second. The costs of
recent steps are measured for this choice.

A step that samples for n sequences and verifies k drafts computes n + k tokens. The step gains n + e tokens, where e is
the expected number of accepted drafts. If memory bandwidth limits the speed of a step, verifying k drafts costs little
time. If computation limits the speed of a step, each draft costs as much time as any other token, so no draft is worth
its time.

On a worker that launches steps before the previous step has ended, drafts also cost a pause of the device between two
steps. Drafts depend on the tokens that the last step sampled, so a step with drafts cannot be launched early.
"""

from collections.abc import Sequence
from itertools import repeat

DECAY = 0.95
"""Factor by which the weight of a measured step in the cost estimate shrinks with each later step."""
CERTAINTY = 8.0
"""Weight of the initial slope in the least-squares fit, in units of a squared difference between two steps' numbers of
tokens.
"""
FIRST_PAUSE = 0.001
"""First estimate, in seconds, of the pause of the device before a step with drafts."""
FIRST_CHANCE = 0.5
FIRST_SHARE = 0.5
HOPE = 0.8
"""First estimate of the probability that a draft is right, for proposers whose drafting costs time. The estimate is
high, because the drafter can learn how often drafts are right only by drafting.
"""
LEARNING = 0.1
FORGETTING = 0.002
"""While no tokens are drafted for a sequence, its estimated probability of right drafts returns to the first estimate
at this rate in each step. After some time, the drafter therefore tries drafts again.
"""


class StepCost:
    """The duration of a step in seconds as a linear function of its number of tokens, fitted to recent steps (decayed
    least squares).
    """

    def __init__(self, seconds_per_token: float) -> None:
        """Create an estimate of the cost of steps.

        seconds_per_token: a measurement of prefill, which is used as the slope until steps of different sizes have been
        measured.
        """
        self._first_slope = seconds_per_token
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        keep = DECAY
        self._weight = keep * self._weight + 1
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds
        self._squares = keep * self._squares + num_tokens * num_tokens
        self._products = keep * self._products + num_tokens * seconds

    @property
    def slope(self) -> float:
        """Seconds that one more token adds to a step."""
        if not self._weight:
            return self._first_slope
        variance = self._squares - self._tokens * self._tokens / self._weight
        covariance = self._products - self._tokens * self._seconds / self._weight
        return max(0.0, (covariance + CERTAINTY * self._first_slope) / (max(0.0, variance) + CERTAINTY))

    def of(self, num_tokens: int) -> float:
        if not self._weight:
            return self._first_slope * num_tokens
        return max(1e-6, (self._seconds + self.slope * (num_tokens * self._weight - self._tokens)) / self._weight)


def numbers_of_drafts(
    chances: Sequence[float],
    mosts: Sequence[int],
    cost: StepCost,
    pause: float,
    *,
    shares: Sequence[float] | None = None,
    drafting: StepCost | None = None,
) -> list[int]:
    """Choose the number of drafts to verify for each sequence of a step. The number is zero for a sequence whose drafts
    are not worth their time.

    chances: for each sequence, the probability that a draft is right if the drafts before it are right. mosts: the
    maximum number of drafts of each sequence. shares: for each sequence, the probability that the proposer finds
    drafts, 1 by default. pause: seconds for which the device is idle before a step with drafts. drafting: the cost of a
    pass that drafts one token for each of several sequences, or None if the cost is negligible. The number of passes is
    the largest number of drafts of a sequence.

    The function tries each possible number of passes. For each number of passes, it adds the likeliest drafts as long
    as the tokens a second increase.
    """
    num_sequences = len(chances)
    numbers = [0] * num_sequences
    if not any(mosts):
        return numbers
    each = 0.0 if drafting is None else max(0.0, drafting.of(1) - drafting.slope)
    slope = cost.slope + (0.0 if drafting is None else drafting.slope)
    alone = cost.of(num_sequences)
    best, chosen = num_sequences / alone, list[int]()  # `chosen`: a row for each draft
    # Drafts as tuples (expected tokens that the draft adds, row of the sequence, number of the draft in the row).
    # Drafts that cost more time than they save are left out.
    likely = list[tuple[float, int, int]]()
    for row, (chance, most, share) in enumerate(zip(chances, mosts, shares or repeat(1.0), strict=False)):
        gain = share
        for number in range(1, most + 1):
            gain *= chance
            if gain <= slope * best:
                break
            likely.append((gain, row, number))
    likely.sort(reverse=True)
    most = max((number for *_, number in likely), default=0)
    for longest in range(1, most + 1) if each else (most,):
        rows, best_count = list[int](), 0
        seconds, gained = alone + pause + longest * each, float(num_sequences)
        for gain, row, number in likely:
            if number > longest:
                continue
            if gain * seconds <= slope * gained:
                break
            rows.append(row)
            gained, seconds = gained + gain, seconds + slope
            if gained / seconds > best:
                best, best_count = gained / seconds, len(rows)
        if best_count:
            chosen = rows[:best_count]
    for row in chosen:
        numbers[row] += 1
    return numbers
