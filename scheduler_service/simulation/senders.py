"""Who sent each request of a trace, and how urgent it was: public traces name neither, so both are dealt out."""

import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from scheduler_service.simulation.trace import Arrival

T = TypeVar("T")


def deal(arrivals: Sequence[Arrival], tenants: Mapping[str, float], priorities: Mapping[int, float]) -> list[Arrival]:
    """Give every request a tenant and a priority, each at random in proportion to its share of all requests.

    The two are independent of each other and of the request, and the same every time.
    """
    draw = random.Random(0)
    tenant, priority = _chooser(tenants), _chooser(priorities)
    return [arrival._replace(tenant=tenant(draw), priority=priority(draw)) for arrival in arrivals]


def _chooser(shares: Mapping[T, float]) -> Callable[[random.Random], T]:
    choices, bounds = list(shares), list(accumulate(shares.values()))
    # Of random's methods only random() promises the same numbers in every version of Python.
    return lambda draw: choices[min(bisect_right(bounds, draw.random() * bounds[-1]), len(choices) - 1)]
