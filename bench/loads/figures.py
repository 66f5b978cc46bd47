"""Computes the compared figures from the arrival times of messages.

A client receives messages, and a message may contain several tokens. The whole pause before a message counts for each
of the message's tokens. Therefore a stream with few, large messages does not look smoother than it is. The time before
the first message counts as time to first token, not as a pause.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request: its sending time, and the arrival time and the number of tokens of each message. All times are
    seconds of one clock.
    """

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
        """Mean time of each token after the first token. The value is None if the request has only one token."""
        further = self.output_tokens - 1
        return (self.messages[-1][0] - self.messages[0][0]) / further if further else None

    def pauses(self) -> list[float]:
        """The pauses of all tokens after the first message. A token's pause is the time before its message."""
        return [at - before for (before, _), (at, tokens) in pairwise(self.messages) for _ in range(tokens)]

    def mean_pauses(self, window: int) -> list[float]:
        """The mean pauses of consecutive groups of `window` tokens.

        If a busy client reads several messages late and together, the mean pauses change little.
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
    """The figures of one system under one load."""

    output_tokens_per_second: float
    total_tokens_per_second: float
    """Tokens per second of prompts and outputs. Cached prompt tokens count too."""
    ttft_ms: float
    """Median time to first token in milliseconds. All figures are medians if their name does not say otherwise."""
    ttft_p99_ms: float
    tpot_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    memory_mib: float
    """Memory of all processes after the load, in MiB."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile by nearest rank: the smallest value that at least `percent` % of the values do not exceed."""
    return sorted(values)[max(math.ceil(percent / 100 * len(values)), 1) - 1]


def median_interval(values: Sequence[float], coverage: float = 0.95) -> tuple[float, float]:
    """A confidence interval of the median. The two values enclose the true median with at least this coverage.

    The interval is the sign test's and assumes no distribution. Of 12 values, the ends of the interval are the third
    smallest and the third largest value. Raises ValueError if there are too few values.
    """
    size, rank = len(values), 0
    beyond = 2 * 0.5**size  # probability that the true median lies outside the interval of this rank
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
