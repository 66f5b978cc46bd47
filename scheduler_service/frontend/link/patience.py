"""How long the current call's client lets it wait while no worker takes requests.

The Python client first lets a request wait for two seconds, learns why it waits, and tells its user.
"""

import math
from contextvars import ContextVar

import grpc

from pagewire_common.calls.errors import RequestError

HEADER = "pagewire-no-worker-timeout"
patience: ContextVar[float] = ContextVar("patience", default=math.inf)
"""Seconds; at most the server's own --no-worker-timeout."""


def note_patience(details: grpc.HandlerCallDetails) -> None:
    """Read the patience from the call's metadata, if present. Raises INVALID_ARGUMENT."""
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
