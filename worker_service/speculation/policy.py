"""How many drafts a step is worth: as many as make tokens come faster, by what such steps have taken so far.

A step of n sequences that verifies k drafts computes n + k tokens, and is expected to gain n + e of them. Where memory
is what limits a step, k more tokens cost next to nothing; where computing does, as much as others, and no draft is
worth it. On a worker that launches steps ahead drafts also cost a pause: what is drafted depends on the last step's
tokens, so the device waits until a step with drafts is launched.
"""

from collections.abc import Sequence
from itertools import repeat

DECAY = 0.95
"""Of what a step has taught about costs, with each later one."""
CERTAINTY = 8.0
"""Of the first slope: as much as of steps whose numbers of tokens have this sum of squared differences."""
FIRST_PAUSE = 0.001
"""Of a worker that launches steps ahead."""
FIRST_CHANCE = 0.5
FIRST_SHARE = 0.5
HOPE = 0.8
"""In place of it where drafting takes time, and drafts that are not worth it are not made: what is never tried would
never be known to be right more often."""
LEARNING = 0.1
FORGETTING = 0.002
"""Of what is known of a sequence whose next tokens are not drafted, with each of its steps, so that drafting is tried
again."""


class StepCost:
    """Seconds of a step by its number of tokens: the line that fits the last steps best (decayed least squares)."""

    def __init__(self, seconds_per_token: float) -> None:
        """The slope until there are steps of different sizes: that of prompts, which compute many at once."""
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
    """How many drafts to verify of each sequence, of which each next one is right with its chance.

    mosts: the most of each. shares: how often there is any draft for it, always unless they are given. drafting: the
    cost of drafting one token for each of some sequences, which is paid as often as the longest draft has tokens; None
    where it costs nothing. Zero for all where that is fastest. For each longest draft, the best numbers are found by
    taking the likeliest draft next, as long as tokens a second rise.
    """
    num_sequences = len(chances)
    numbers = [0] * num_sequences
    if not any(mosts):
        return numbers
    each = 0.0 if drafting is None else max(0.0, drafting.of(1) - drafting.slope)
    slope = cost.slope + (0.0 if drafting is None else drafting.slope)
    alone = cost.of(num_sequences)
    best, chosen = num_sequences / alone, list[int]()  # rows, one for each draft
    likely = list[tuple[float, int, int]]()  # gain, row, and which of its drafts: those that are worth their own time
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
