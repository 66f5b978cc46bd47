"""Assigns a tenant, a priority and a conversation to each request of a trace. Senders are assigned because public
traces do not contain them.
"""

import heapq
import random
from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, count
from typing import TypeVar

from scheduler_service.simulation.trace import Arrival

T = TypeVar("T")


def deal(arrivals: Sequence[Arrival], tenants: Mapping[str, float], priorities: Mapping[int, float]) -> list[Arrival]:
    """Give every request a random tenant and priority, in proportion to their shares of all requests.

    Tenant and priority do not depend on each other or on the request. Every run gives a request the same tenant and
    priority.
    """
    draw = random.Random(0)
    tenant, priority = _chooser(tenants), _chooser(priorities)
    return [arrival._replace(tenant=tenant(draw), priority=priority(draw)) for arrival in arrivals]


def _chooser(shares: Mapping[T, float]) -> Callable[[random.Random], T]:
    choices, bounds = list(shares), list(accumulate(shares.values()))
    # In Python's random module, only random() promises the same numbers in every version of Python.
    return lambda draw: choices[min(bisect_right(bounds, draw.random() * bounds[-1]), len(choices) - 1)]


def converse(arrivals: Sequence[Arrival], *, pause: float, most_turns: int) -> list[Arrival]:
    """Make each request a turn of a conversation, if its prompt is long enough to contain the conversation's previous
    turns.

    A turn begins at least `pause` seconds after the previous turn. A turn continues the longest conversation that fits
    into the turn's prompt. Every turn's prompt begins with the previous turn's prompt and output.
    """
    # Conversations in their pause, sorted by the pause's end. The fields are: the pause's end, tokens so far, number of
    # turns, the conversation's number.
    resting: list[tuple[float, int, int, int]] = []
    said: list[tuple[int, int, int]] = []  # conversations whose pause between two turns has ended
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
