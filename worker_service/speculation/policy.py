"""Chooses the number of drafts to verify in a step, so that the step gains the most tokens a second.

With n sequences and k drafts, a step computes n + k tokens and gains n + e tokens, where e is the expected number of
accepted drafts. If memory bandwidth limits the step, drafts cost little; if computation does, no draft is worth its
time.

On a worker that launches steps ahead, drafts also cost a pause, because a step with drafts depends on the last
tokens."""

from collections.abc import Sequence
from itertools import repeat

DECAY = 0.95
"""Factor by which each later step shrinks a measured step's weight."""
CERTAINTY = 8.0
"""Weight of the initial slope in the least-squares fit, in squared tokens."""
FIRST_PAUSE = 0.001
"""First estimate of the device's pause before a step with drafts, in seconds."""
FIRST_CHANCE = 0.5
FIRST_SHARE = 0.5
HOPE = 0.8
"""First estimate that a draft is right, if drafting costs time. High, because only drafting shows how often drafts are
right."""
LEARNING = 0.1
FORGETTING = 0.002
"""Rate in each step without drafts at which a sequence's estimate returns to the first, so that drafts are tried
again."""


class StepCost:
    """A step's seconds as a linear function of its tokens, fitted to recent steps (decayed least squares)."""

    def __init__(self, seconds_per_token: float) -> None:
        """seconds_per_token: from prefill, the slope until steps of different sizes are measured."""
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
    """Choose the number of drafts to verify for each sequence; 0 if drafts are not worth their time.

    chances: probability that a draft is right if those before it are. mosts: maximum drafts. shares: probability that
    drafts are found, 1 by default. pause: idle seconds before a step with drafts. drafting: cost of a pass that drafts
    one token for each sequence, or None if negligible.

    For each possible number of drafting passes, the likeliest drafts are added as long as the tokens a second
    increase."""
    num_sequences = len(chances)
    numbers = [0] * num_sequences
    if not any(mosts):
        return numbers
    each = 0.0 if drafting is None else max(0.0, drafting.of(1) - drafting.slope)
    slope = cost.slope + (0.0 if drafting is None else drafting.slope)
    alone = cost.of(num_sequences)
    best, chosen = num_sequences / alone, list[int]()  # `chosen`: a row for each draft
    # (expected tokens that the draft adds, row of the sequence, number of the draft in the row), only of drafts that
    # pay.
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
