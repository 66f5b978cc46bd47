"""Expensive work in a process that the system kills at its limits: the half in the process.

The front end starts `python -m MODULE` with a socket as stdin (limited_process.py is its half). That process imports
the work's modules, and forks a worker process within milliseconds. The fork sets a timer and a memory limit for each
piece of work. Libraries need not cooperate: the timer's signal also ends a loop inside C. The first process sees how a
fork has ended, reports it, and forks another one.
"""

import os
import resource
import signal
import struct
from collections.abc import Callable
from enum import IntEnum
from multiprocessing.connection import Connection

from pagewire_common.processes.child_process import end_with_the_parent, leave_signals_to_the_parent

LIMITS = struct.Struct("=dQ")
"""Header of each piece of work: CPU seconds, and bytes of data, including the idle process's data."""


class Outcome(IntEnum):
    """The first byte of a reply; data follows only after `DONE`."""

    DONE = 0
    TOO_LONG = 1
    TOO_MUCH_MEMORY = 2
    TOO_DEEP = 3


_END, _ANOTHER = 0, 3
"""Exit statuses of a fork: end without a reply, or continue with another fork."""
_ENDED_BY: dict[int, Outcome] = {
    signal.SIGPROF: Outcome.TOO_LONG,
    signal.SIGABRT: Outcome.TOO_MUCH_MEMORY,  # Rust aborts if an allocation fails
    signal.SIGSEGV: Outcome.TOO_DEEP,  # a stack overflow
}


def connect_to_the_front_end() -> Connection:
    """The connection to the front end; this process ends when it closes."""
    end_with_the_parent()
    leave_signals_to_the_parent()
    return Connection(0)


def serve(connection: Connection, answer: Callable[[bytes], bytes], most_kept: int) -> None:
    """Answer each piece of work, until the front end closes the connection or a fork was killed from outside.

    A fork that has held more than `most_kept` bytes ends, which frees them.
    """
    while True:
        if not (process := os.fork()):
            status = _END
            try:
                end_with_the_parent()
                status = _answer_each(connection, answer, most_kept)
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        outcome = _ENDED_BY.get(-status)
        if outcome is None and status != _ANOTHER:  # the front end restarts this program, and asks again
            return
        if outcome is not None:
            try:
                connection.send_bytes(bytes([outcome]))
            except OSError:  # the front end is gone
                return


def _answer_each(connection: Connection, answer: Callable[[bytes], bytes], most_kept: int) -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return _END
        connection.send_bytes(_limited(message, answer))
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 > most_kept:
            return _ANOTHER


def _limited(message: bytes, answer: Callable[[bytes], bytes]) -> bytes:
    seconds, num_bytes = LIMITS.unpack_from(message)
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, most))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return bytes([Outcome.DONE]) + answer(message[LIMITS.size :])
    except MemoryError:
        return bytes([Outcome.TOO_MUCH_MEMORY])
    except RecursionError:
        return bytes([Outcome.TOO_DEEP])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))  # the next message may be large
