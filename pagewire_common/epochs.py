"""Epochs number the sessions of a worker, in increasing order.

A scheduler takes its clock's nanoseconds, or the worker's newest epoch + 1 if that is larger. No session could follow
epoch 2^64 - 1, which would make the worker useless. So an epoch may skip numbers only up to MAX; above, each epoch is
its predecessor + 1.
"""

MAX = 2**63 - 1
"""The largest epoch from a clock: nanoseconds since 1970 reach it in the year 2262."""
LAST = 2**64 - 1
"""The largest number that the message's field holds."""


def next_epoch(newest: int, now: int) -> int:
    """The epoch after `newest`; `now` is the clock in nanoseconds. Raises ValueError if there is none."""
    if newest >= LAST:
        raise ValueError(f"the newest epoch is said to be {newest}, and no session can be newer")
    return max(min(now, MAX), newest + 1)


def check_epoch(epoch: int, newest: int) -> None:
    """Raises ValueError if a session of this epoch cannot follow epoch `newest`."""
    if epoch <= newest:
        raise ValueError(f"epoch {epoch} is not newer than epoch {newest}, which this worker has served")
    if epoch > max(MAX, newest + 1):
        raise ValueError(f"epoch {epoch} is above {MAX}, and not the one after epoch {newest}")
