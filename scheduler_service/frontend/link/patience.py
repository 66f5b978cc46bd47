"""The seconds that a client lets its call wait while no worker takes requests.

The Python client at first limits this wait to two seconds. If the request then fails, the error names the reason for
the wait, which the client shows to its user.
"""

import math
from contextvars import ContextVar

import grpc

from pagewire_common.calls.errors import RequestError

HEADER = "pagewire-no-worker-timeout"
patience: ContextVar[float] = ContextVar("patience", default=math.inf)
"""Seconds that the current call may wait for a worker. If the server's --no-worker-timeout is shorter, it applies
instead.
"""


def note_patience(details: grpc.HandlerCallDetails) -> None:
    """Set `patience` from the header in a call's metadata, if present.

    Raises INVALID_ARGUMENT for a malformed value.
    """
    for name, value in details.invocation_metadata or ():
        if name != HEADER:
            continue
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            reason = f"metadata {HEADER} is {str(value)[:40]!r}; it must be a number of seconds, 0 or more"
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, reason)
        patience.set(seconds)
