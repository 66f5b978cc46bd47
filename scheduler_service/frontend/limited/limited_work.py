"""Runs expensive work within limits of CPU time or memory: the limited process's side.

The process, whose stdin is a socket, imports what the work needs, and forks a child in milliseconds. The child sets a
timer, whose signal also ends a loop in C, and a memory limit. After a child's death, its parent reports the limit and
forks another.
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
"""Message before each piece of work: CPU seconds, and data bytes with those of the idle process."""


class Outcome(IntEnum):
    """The first byte of a reply. Data follows only `DONE`."""

    DONE = 0
    TOO_LONG = 1
    TOO_MUCH_MEMORY = 2
    TOO_DEEP = 3


_END, _ANOTHER = 0, 3
"""Exit statuses of a child: after `_END` the parent ends without a reply, after `_ANOTHER` it forks another child."""
# Signals that end a child at a limit. Rust code aborts if an allocation fails; a stack overflow causes SIGSEGV.
_ENDED_BY: dict[int, Outcome] = {
    signal.SIGPROF: Outcome.TOO_LONG,
    signal.SIGABRT: Outcome.TOO_MUCH_MEMORY,
    signal.SIGSEGV: Outcome.TOO_DEEP,
}


def connect_to_the_front_end() -> Connection:
    """The connection to the front end, whose close ends this process."""
    end_with_the_parent()
    leave_signals_to_the_parent()
    return Connection(0)


def serve(connection: Connection, answer: Callable[[bytes], bytes], most_kept: int) -> None:
    """Answer each piece of work, until the front end closes the connection or a child is killed from outside.

    A child with more than `most_kept` bytes of resident memory ends, to free the memory.
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
        if outcome is None and status != _ANOTHER:  # the front end then restarts this program and repeats the work
            return
        if outcome is not None:
            try:
                connection.send_bytes(bytes([outcome]))
            except OSError:  # the front end has ended
                return


def _answer_each(connection: Connection, answer: Callable[[bytes], bytes], most_kept: int) -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            limits, message = connection.recv_bytes(), connection.recv_bytes()
        except (EOFError, OSError):
            return _END
        connection.send_bytes(_limited(limits, message, answer))
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 > most_kept:
            return _ANOTHER


def _limited(limits: bytes, message: bytes, answer: Callable[[bytes], bytes]) -> bytes:
    seconds, num_bytes = LIMITS.unpack(limits)
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, most))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return bytes([Outcome.DONE]) + answer(message)
    except MemoryError:
        return bytes([Outcome.TOO_MUCH_MEMORY])
    except RecursionError:
        return bytes([Outcome.TOO_DEEP])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))  # receiving the next piece of work may take more memory
