"""Chooses the number of drafts that gives the most tokens a second, by the measured costs of recent steps.

A step of n sequences that verifies k drafts computes n + k tokens. The step is expected to gain n + e tokens, where e
is the expected number of accepted drafts. If memory bandwidth limits the speed of a step, k more tokens cost little
time. If computation limits the speed of a step, k more tokens cost as much as other tokens, and no draft is worth its
time.

On a worker that launches steps ahead, drafts also cost a pause. Drafts depend on the last step's tokens, so the device
is idle until a step with drafts is launched.
"""

from collections.abc import Sequence
from itertools import repeat

DECAY = 0.95
"""Factor by which a step's weight in the cost estimate shrinks with each later step."""
CERTAINTY = 8.0
"""Weight of the first slope in the least-squares fit. The unit is a squared difference of two numbers of tokens."""
FIRST_PAUSE = 0.001
"""First estimate of the pause in seconds, on a worker that launches steps ahead."""
FIRST_CHANCE = 0.5
FIRST_SHARE = 0.5
HOPE = 0.8
"""First estimate of a draft's chance to be right, if drafting has a cost. The estimate is high, because the drafter
learns the success of drafts only by making drafts.
"""
LEARNING = 0.1
FORGETTING = 0.002
"""Rate at which the estimated chance of a sequence's drafts returns to the first estimate while no drafts are made.
After some time the drafter therefore tries drafts again.
"""


class StepCost:
    """Seconds of a step as a linear function of its tokens, fitted to the last steps (decayed least squares)."""

    def __init__(self, seconds_per_token: float) -> None:
        """Create an estimate.

        seconds_per_token: measured on a prompt, and used as the slope until steps of different sizes have been
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
        """Seconds of one more token."""
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
    """Choose the number of drafts to verify for each sequence. All numbers are zero if no draft is worth its time.

    chances: for each sequence, the chance of each next draft to be right. mosts: the maximum number of drafts of each
    sequence. shares: the probability that a sequence has drafts, 1 by default. drafting: the cost of drafting one token
    for each of several sequences, or None if the cost is negligible. The cost of drafting is paid once for each token
    of the longest draft.

    Each possible length of the longest draft is tried. For each length, the likeliest drafts are added while tokens a
    second increase.
    """
    num_sequences = len(chances)
    numbers = [0] * num_sequences
    if not any(mosts):
        return numbers
    each = 0.0 if drafting is None else max(0.0, drafting.of(1) - drafting.slope)
    slope = cost.slope + (0.0 if drafting is None else drafting.slope)
    alone = cost.of(num_sequences)
    best, chosen = num_sequences / alone, list[int]()  # `chosen` contains one row number for each draft.
    # Tuples (gain, row, number of the draft in the row), only for drafts that save more time than they cost.
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
