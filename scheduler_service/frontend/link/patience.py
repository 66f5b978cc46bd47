"""The seconds that a client lets its call wait while no worker takes requests.

The Python client first lets a request wait for two seconds. The request then fails with the reason of the wait, and the
client tells its user the reason.
"""

import math
from contextvars import ContextVar

import grpc

from pagewire_common.calls.errors import RequestError

HEADER = "pagewire-no-worker-timeout"
patience: ContextVar[float] = ContextVar("patience", default=math.inf)
"""Seconds that the current call may wait. If the server's --no-worker-timeout is shorter, the server's limit applies.
"""


def note_patience(details: grpc.HandlerCallDetails) -> None:
    """Set `patience` from the call's metadata, if present. Raises INVALID_ARGUMENT for a malformed value."""
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
