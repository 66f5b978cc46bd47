"""Starts child processes of a service, for work that may have to be killed. They end when the service ends."""

import ctypes
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def start_child(module: str, arguments: Sequence[str] = ()) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start `python -m MODULE` with a socket as its stdin. Returns the process, and the parent's end of the socket
    pair.

    On Linux, the child is killed when the thread that calls this function ends. Raises OSError.
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
    """Have the system kill this process when its parent ends, even if this process hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_signals_to_the_parent() -> None:
    """Ignore Ctrl-C and SIGTERM: the parent receives them too, and ends its children in the right order."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
