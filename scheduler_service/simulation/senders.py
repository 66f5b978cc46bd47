"""Assigns tenants, priorities and conversations, which public traces lack."""

import heapq
import random
from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, count
from typing import TypeVar

from scheduler_service.simulation.trace import Arrival

T = TypeVar("T")


def deal(arrivals: Sequence[Arrival], tenants: Mapping[str, float], priorities: Mapping[int, float]) -> list[Arrival]:
    """Give every request a random tenant and priority by their shares, independent of each other and equal in every
    run.
    """
    draw = random.Random(0)
    tenant, priority = _chooser(tenants), _chooser(priorities)
    return [arrival._replace(tenant=tenant(draw), priority=priority(draw)) for arrival in arrivals]


def _chooser(shares: Mapping[T, float]) -> Callable[[random.Random], T]:
    choices, bounds = list(shares), list(accumulate(shares.values()))
    # random() alone promises equal numbers in every version of Python.
    return lambda draw: choices[min(bisect_right(bounds, draw.random() * bounds[-1]), len(choices) - 1)]


def converse(arrivals: Sequence[Arrival], *, pause: float, most_turns: int) -> list[Arrival]:
    """Make each request a turn of a conversation, if its prompt has room for the previous turns.

    A turn begins at least `pause` seconds after the previous turn, and continues the longest conversation that fits.
    """
    # Conversations in their pause: its end, tokens so far, number of turns, number.
    resting: list[tuple[float, int, int, int]] = []
    said: list[tuple[int, int, int]] = []  # conversations after their pause
    numbers = count()
    turns: list[Arrival] = []
    for arrival in arrivals:
        while resting and resting[0][0] <= arrival.at:
            insort(said, heapq.heappop(resting)[1:])
        place = bisect_right(said, (arrival.prompt_tokens, 0, 0)) - 1
        _, num_turns, number = said.pop(place) if place >= 0 else (0, 0, next(numbers))
        turns.append(arrival._replace(conversation=number))
        if num_turns + 1 < most_turns:
            total = arrival.prompt_tokens + arrival.output_tokens
            heapq.heappush(resting, (arrival.at + pause, total, num_turns + 1, number))
    return turns
