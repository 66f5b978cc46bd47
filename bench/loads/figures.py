"""Computes the compared figures from the arrival times of messages; arithmetic only.

A reader sees messages, not tokens, and a message may bring several tokens. Each token is charged the whole pause before
its message. So a stream that sends fewer, larger messages never looks smoother than it was, and a long pause is not
diluted by the tokens that ended it. The time before the first message is no pause, but the time to the first token.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request: when it was sent, and when how many tokens arrived. Seconds of one clock."""

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
        """The mean time of each token after the first; None if there is no such token."""
        further = self.output_tokens - 1
        return (self.messages[-1][0] - self.messages[0][0]) / further if further else None

    def pauses(self) -> list[float]:
        """The pause charged to each token after the first message."""
        return [at - before for (before, _), (at, tokens) in pairwise(self.messages) for _ in range(tokens)]

    def mean_pauses(self, window: int) -> list[float]:
        """The mean pauses of consecutive runs of `window` tokens. Messages that arrived late and together, as at a busy
        reader, change these means little.
        """
        times = [at for at, tokens in self.messages for _ in range(tokens)][::window]
        return [(later - earlier) / window for earlier, later in pairwise(times)]


@dataclass(frozen=True, slots=True)
class Run:
    """One load, once."""

    seconds: float
    timelines: Sequence[Timeline]


@dataclass(frozen=True, slots=True)
class Figures:
    """One system under one load."""

    output_tokens_per_second: float
    total_tokens_per_second: float
    """Tokens a second of prompts, cached or not, and outputs."""
    ttft_ms: float
    """The median, like all figures without another name."""
    ttft_p99_ms: float
    tpot_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    memory_mib: float
    """Memory of all processes, after the load."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least `percent` of a hundred of them do not exceed (nearest rank)."""
    return sorted(values)[max(math.ceil(percent / 100 * len(values)), 1) - 1]


def median_interval(values: Sequence[float], coverage: float = 0.95) -> tuple[float, float]:
    """The two values between which the median of their distribution lies, with at least this coverage.

    No distribution is assumed (the sign test's interval): of 12 values, the third smallest and the third largest.
    Raises ValueError if there are too few values.
    """
    size, rank = len(values), 0
    beyond = 2 * 0.5**size  # the probability that the median is outside of the values of this rank
    while beyond <= 1 - coverage:
        rank += 1
        beyond += 2 * math.comb(size, rank) * 0.5**size
    if not rank:
        raise ValueError(f"{size} values do not tell the median with a coverage of {coverage}")
    ordered = sorted(values)
    return ordered[rank - 1], ordered[size - rank]


def rate(runs: Sequence[Run]) -> float:
    """Output tokens a second."""
    tokens = sum(timeline.output_tokens for run in runs for timeline in run.timelines)
    return tokens / sum(run.seconds for run in runs)


def summarise(runs: Sequence[Run], memory_mib: float) -> Figures:
    """The figures over all runs of a load."""
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
