"""The benchmarks' loads: when requests are sent, and the lengths and random tokens of their prompts, equal for all
systems.

With different seeds, no run finds another's prompts in a prefix cache.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler_service.simulation.trace import Arrival

CONTEXT = 2048
"""Tokens of a sequence with which systems are started. Longer requests of a trace are cut."""
CACHE_GIB = 2
"""GiB of keys and values of each system."""
WARM_UP_PROMPT_TOKENS = 8192
WARM_UP_OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """Requests with arrival times. At `concurrency` in flight, the next is sent when one has ended."""

    name: str
    title: str
    arrivals: Sequence[Arrival]
    concurrency: int
    shared_tokens: int = 0
    """Leading tokens of all prompts but the first `num_others`."""
    num_others: int = 0
    """Requests at the beginning whose prompts share no tokens."""

    def prompts(self, vocabulary_size: int, seed: object) -> list[list[int]]:
        draw = random.Random(f"{self.name} {seed}")
        shared = [draw.randrange(vocabulary_size) for _ in range(self.shared_tokens)]
        prefixes: list[list[int]] = [[]] * self.num_others + [shared] * (len(self.arrivals) - self.num_others)
        return [
            prefix + [draw.randrange(vocabulary_size) for _ in range(arrival.prompt_tokens - len(prefix))]
            for prefix, arrival in zip(prefixes, self.arrivals, strict=True)
        ]

    def warm_up(self) -> "Load":
        """The first requests of this load, all at once, with a few output tokens each."""
        arrivals: list[Arrival] = []
        for arrival in self.arrivals[: self.concurrency]:
            if sum(earlier.prompt_tokens for earlier in arrivals) >= WARM_UP_PROMPT_TOKENS:
                break
            output_tokens = min(arrival.output_tokens, WARM_UP_OUTPUT_TOKENS)
            arrivals.append(arrival._replace(at=0.0, output_tokens=output_tokens))
        return replace(self, arrivals=arrivals)


def streams(prompt_tokens: int, output_tokens: int, concurrency: int, num_requests: int) -> Load:
    """Simultaneous streams, each replaced when it ends."""
    arrival = Arrival(0.0, prompt_tokens, output_tokens)
    title = f"{prompt_tokens}/{output_tokens} x {concurrency}"
    return Load(f"{prompt_tokens}x{concurrency}", title, [arrival] * num_requests, concurrency)


def shared_prefix(shared_tokens: int, own_tokens: int, output_tokens: int, num_requests: int) -> Load:
    """Requests sent at once, whose prompts share a prefix that no cache has: a server computes it once or for each."""
    arrival = Arrival(0.0, shared_tokens + own_tokens, output_tokens)
    title = f"{shared_tokens}+{own_tokens}/{output_tokens} x {num_requests}"
    return Load("prefix", title, [arrival] * num_requests, num_requests, shared_tokens)


def busy_prefix(shared_tokens: int, own_tokens: int, output_tokens: int, num_requests: int) -> Load:
    """`shared_prefix` half a second after four other streams, so that its requests start to run together."""
    others = [Arrival(0.0, 128, 192)] * 4
    arrival = Arrival(0.5, shared_tokens + own_tokens, output_tokens)
    title = f"4 streams, {shared_tokens}+{own_tokens}/{output_tokens} x {num_requests}"
    arrivals = [*others, *[arrival] * num_requests]
    return Load("busyprefix", title, arrivals, len(arrivals), shared_tokens, len(others))


def replayed(trace: Sequence[Arrival], speedup: float) -> Load:
    """A trace, `speedup` times as fast, without a limit on requests in flight, cut to the context length."""
    return Load("trace", f"trace x {speedup:g}", [capped(arrival) for arrival in trace], len(trace))


def capped(arrival: Arrival, context: int = CONTEXT) -> Arrival:
    """Cut the output to half the context length, and the prompt to the rest."""
    output_tokens = min(arrival.output_tokens, context // 2)
    return arrival._replace(
        prompt_tokens=min(arrival.prompt_tokens, context - output_tokens), output_tokens=output_tokens
    )


def choose(names: str | None, loads: Sequence[Load]) -> list[Load]:
    """The loads of these names. Raises ValueError for an unknown one."""
    if names is None:
        return list(loads)
    by_name = {load.name: load for load in loads}
    wanted = names.split(",")
    if unknown := [name for name in wanted if name not in by_name]:
        raise ValueError(f"there is no load {unknown[0]!r} here, but {', '.join(by_name)}")
    return [by_name[name] for name in wanted]


LOADS = (
    streams(128, 128, 1, num_requests=4),
    streams(128, 128, 8, num_requests=24),
    streams(128, 128, 32, num_requests=64),
    streams(128, 128, 64, num_requests=128),
    streams(1024, 64, 16, num_requests=32),
    shared_prefix(1000, 24, 64, num_requests=32),
    busy_prefix(1000, 24, 64, num_requests=32),
)
