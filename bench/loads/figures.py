"""Computes the figures of a load from the arrival times of the messages that its streams sent.

A message of a stream may contain several tokens. The whole pause before a message counts for each of the message's
tokens, so that a stream with few, large messages does not look smoother than it is. The time before a stream's first
message counts as time to first token, not as a pause.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times of one request: the time at which it was sent, and for each message of its stream the arrival time and
    the number of tokens. All times are in seconds of the same clock.
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
        """Time per output token (TPOT): the mean time of each output token after the first token. The time is None if
        the output has only one token.
        """
        further = self.output_tokens - 1
        return (self.messages[-1][0] - self.messages[0][0]) / further if further else None

    def pauses(self) -> list[float]:
        """The pauses of all tokens after the first message. A token's pause is the time between the previous message
        and the token's message.
        """
        return [at - before for (before, _), (at, tokens) in pairwise(self.messages) for _ in range(tokens)]

    def mean_pauses(self, window: int) -> list[float]:
        """The mean pause of each group of `window` consecutive tokens.

        If a busy client reads several messages late and together, these means change less than single pauses.
        """
        times = [at for at, tokens in self.messages for _ in range(tokens)][::window]
        return [(later - earlier) / window for earlier, later in pairwise(times)]


@dataclass(frozen=True, slots=True)
class Run:
    """The timelines of all requests of one run of a load."""

    seconds: float
    timelines: Sequence[Timeline]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one system under one load."""

    output_tokens_per_second: float
    total_tokens_per_second: float
    """Prompt tokens and output tokens per second, including cached prompt tokens."""
    ttft_ms: float
    """Median time to first token in milliseconds. All figures of a load are medians if their names do not say
    otherwise.
    """
    ttft_p99_ms: float
    tpot_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    memory_mib: float
    """Memory of all the system's processes after the load, in MiB."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile by nearest rank: the smallest value that at least `percent` % of the values do not exceed."""
    return sorted(values)[max(math.ceil(percent / 100 * len(values)), 1) - 1]


def median_interval(values: Sequence[float], coverage: float = 0.95) -> tuple[float, float]:
    """A confidence interval of the median. The true median lies between the two returned values with at least the
    probability `coverage`.

    The interval is derived from the sign test, which assumes no distribution. For 12 values and a coverage of 0.95, the
    ends of the interval are the third smallest and the third largest value. Raises ValueError if there are too few
    values.
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
    """Output tokens per second over all runs of a load."""
    tokens = sum(timeline.output_tokens for run in runs for timeline in run.timelines)
    return tokens / sum(run.seconds for run in runs)


def summarise(runs: Sequence[Run], memory_mib: float) -> Figures:
    """The figures of a load, computed over all of its runs."""
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
