"""The order in which masks are computed, and the choice of outputs to end if matchers need too much memory."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from worker_service.execution.sampling.form_process import MAX_MEMORY
from worker_service.execution.sampling.form_progress import FormedOutput

MAX_TOGETHER = 5 * MAX_MEMORY // 8
"""Bytes of all matchers together. The process's address space was up to 1.3 times as large."""

WithRows = tuple[FormedOutput, npt.NDArray[np.uint8]]
"""An output and its rows in the array of masks."""


def in_turns(
    items: Iterable[WithRows],
) -> list[WithRows]:
    """One output of each tenant, then a second output of each tenant, and so on.

    In each round, tenants with less used time come first, and of a tenant's outputs the one with the least used time.
    """
    of_owner: defaultdict[bytes, float] = defaultdict(float)
    turns: list[tuple[int, WithRows]] = []
    number: Counter[bytes] = Counter()
    for one in sorted(items, key=lambda one: one[0].progress.taken):
        of_owner[one[0].owner] += one[0].progress.taken
        turns.append((number[one[0].owner], one))
        number[one[0].owner] += 1
    turns.sort(key=lambda turn: (turn[0], of_owner[turn[1][0].owner]))
    return [one for _, one in turns]


def largest(
    items: Iterable[WithRows],
) -> Iterator[WithRows]:
    """The outputs to end, until the rest need at most `MAX_TOGETHER` bytes.

    Each is the largest output of the tenant that needs the most memory at that point.
    """
    alive = [one for one in items if not one[0].progress.is_over]
    by_owner: Counter[bytes] = Counter()
    for item, _ in alive:
        by_owner[item.owner] += item.progress.memory
    while sum(by_owner.values()) > MAX_TOGETHER:
        ((owner, _),) = by_owner.most_common(1)
        most = max((one for one in alive if one[0].owner == owner), key=lambda one: one[0].progress.memory)
        alive.remove(most)
        by_owner[owner] -= most[0].progress.memory
        yield most
