"""Epochs number the sessions of a worker: the scheduler's clock in nanoseconds, or the newest epoch + 1 if larger.

Epochs above MAX skip no numbers, so that the last epoch, 2^64 - 1, is never reached.
"""

MAX = 2**63 - 1
"""Largest epoch that a clock may give: nanoseconds since 1970 reach it in the year 2262."""
LAST = 2**64 - 1


def next_epoch(newest: int, now: int) -> int:
    """The epoch after `newest`. `now`: nanoseconds. Raises ValueError if no epoch can follow."""
    if newest >= LAST:
        raise ValueError(f"the newest epoch is said to be {newest}, and no session can be newer")
    return max(min(now, MAX), newest + 1)


def check_epoch(epoch: int, newest: int) -> None:
    """Raise ValueError if a session of this epoch cannot follow a session of epoch `newest`."""
    if epoch <= newest:
        raise ValueError(f"epoch {epoch} is not newer than epoch {newest}, which this worker has served")
    if epoch > max(MAX, newest + 1):
        raise ValueError(f"epoch {epoch} is above {MAX}, and not the one after epoch {newest}")
