"""Computes the figures of a load from the arrival times of its streams' messages.

The whole pause before a message counts for each of its tokens, so that few, large messages do not look smooth. The time
before the first message is time to first token, not a pause.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request: when it was sent, and each message's arrival (seconds of the same clock) and number of tokens."""

    began: float
    prompt_tokens: int
    messages: Sequence[tuple[float, int]]

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.messages)

    @property
    def ttft(self) -> float:
        return self.messages[0][0] - self.began

    @property
    def tpot(self) -> float | None:
        """Time per output token: the mean of all tokens after the first; None for a single token."""
        further = self.output_tokens - 1
        return (self.messages[-1][0] - self.messages[0][0]) / further if further else None

    def pauses(self) -> list[float]:
        """For each token after the first message, the time from the previous message to its own."""
        return [at - before for (before, _), (at, tokens) in pairwise(self.messages) for _ in range(tokens)]

    def mean_pauses(self, window: int) -> list[float]:
        """The mean pause of each group of `window` consecutive tokens.

        A busy client that reads several messages late changes these less than single pauses.
        """
        times = [at for at, tokens in self.messages for _ in range(tokens)][::window]
        return [(later - earlier) / window for earlier, later in pairwise(times)]


@dataclass(frozen=True, slots=True)
class Run:
    """The timelines of one run of a load."""

    seconds: float
    timelines: Sequence[Timeline]


@dataclass(frozen=True, slots=True)
class Figures:
    output_tokens_per_second: float
    total_tokens_per_second: float
    """Prompt and output tokens, cached ones included."""
    ttft_ms: float
    """Median. All figures are medians if their names do not say otherwise."""
    ttft_p99_ms: float
    tpot_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    memory_mib: float
    """All the system's processes after the load."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest value that at least `percent` % do not exceed."""
    return sorted(values)[max(math.ceil(percent / 100 * len(values)), 1) - 1]


def median_interval(values: Sequence[float], coverage: float = 0.95) -> tuple[float, float]:
    """A confidence interval of the median with at least the probability `coverage`, by the sign test.

    The test assumes no distribution. For 12 values and 0.95, the ends are the third smallest and third largest value.
    Raises ValueError if there are too few values.
    """
    size, rank = len(values), 0
    beyond = 2 * 0.5**size  # probability that the true median lies outside the interval
    while beyond <= 1 - coverage:
        rank += 1
        beyond += 2 * math.comb(size, rank) * 0.5**size
    if not rank:
        raise ValueError(f"{size} values do not tell the median with a coverage of {coverage}")
    ordered = sorted(values)
    return ordered[rank - 1], ordered[size - rank]


def rate(runs: Sequence[Run]) -> float:
    """Output tokens per second over all runs."""
    tokens = sum(timeline.output_tokens for run in runs for timeline in run.timelines)
    return tokens / sum(run.seconds for run in runs)


def summarise(runs: Sequence[Run], memory_mib: float) -> Figures:
    timelines = [timeline for run in runs for timeline in run.timelines]
    ttfts = [timeline.ttft for timeline in timelines]
    tpots = [tpot for timeline in timelines if (tpot := timeline.tpot) is not None]
    pauses = [pause for timeline in timelines for pause in timeline.pauses()]
    prompt_tokens = sum(timeline.prompt_tokens for timeline in timelines)
    return Figures(
        output_tokens_per_second=rate(runs),
        total_tokens_per_second=rate(runs) + prompt_tokens / sum(run.seconds for run in runs),
        ttft_ms=1e3 * statistics.median(ttfts),
        ttft_p99_ms=1e3 * percentile(ttfts, 99),
        tpot_ms=1e3 * statistics.median(tpots),
        itl_p50_ms=1e3 * percentile(pauses, 50),
        itl_p99_ms=1e3 * percentile(pauses, 99),
        memory_mib=memory_mib,
    )
