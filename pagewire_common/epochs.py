"""Epochs, which number the sessions of a worker: each is newer than all before it, and none can be the last.

A scheduler takes its clock's nanoseconds, or the epoch after the worker's newest if that is more. A worker would be of
no use after an epoch of 2^64 - 1. So an epoch may leave others out only up to MAX; above, it is the next one.
"""

MAX = 2**63 - 1
"""The largest epoch of a clock, whose nanoseconds since 1970 reach it in the year 2262."""
LAST = 2**64 - 1
"""The largest number that the message's field holds."""


def next_epoch(newest: int, now: int) -> int:
    """For the session after one of epoch `newest`; `now` are a clock's nanoseconds. Raises ValueError for the last."""
    if newest >= LAST:
        raise ValueError(f"the newest epoch is said to be {newest}, and no session can be newer")
    return max(min(now, MAX), newest + 1)


def check_epoch(epoch: int, newest: int) -> None:
    """Raises ValueError where a session of this epoch cannot follow one of epoch `newest`."""
    if epoch <= newest:
        raise ValueError(f"epoch {epoch} is not newer than epoch {newest}, which this worker has served")
    if epoch > max(MAX, newest + 1):
        raise ValueError(f"epoch {epoch} is above {MAX}, and not the one after epoch {newest}")
