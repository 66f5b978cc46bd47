"""Processes that a service starts beside itself for work that may have to be ended: they end with the service."""

import ctypes
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def start_child(module: str, arguments: Sequence[str] = ()) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """`python -m MODULE`, with a socket as its stdin, and the other end of that. Raises OSError.

    On Linux it is killed with the thread that calls this.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            command = [sys.executable, "-m", module, *arguments]
            return subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True), ours
        except OSError:
            ours.close()
            raise


def end_with_the_parent() -> None:
    """Have the system kill this process when the one that started it is gone, also if this one hangs by then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_signals_to_the_parent() -> None:
    """Ctrl-C, and a SIGTERM to all processes of a service, are for that one, which then ends the others in order."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
