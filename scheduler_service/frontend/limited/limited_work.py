"""Runs expensive work in a process that the kernel kills at a limit of CPU time or memory: the limited process's side.

The front end starts `python -m MODULE` with a socket as stdin (limited_process.py). The started process imports the
modules that the work needs, and forks a child, which takes milliseconds. The child sets a timer and a memory limit for
each piece of work. Libraries need not support limits: the timer's signal also ends a loop in C code. If a child was
killed at a limit, its parent reports the limit to the front end and forks another child.
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
"""Header of each piece of work: the limits of CPU seconds and of data bytes. The limit of bytes includes the data of
the idle process.
"""


class Outcome(IntEnum):
    """The first byte of a reply to the front end. Data follows only the byte `DONE`."""

    DONE = 0
    TOO_LONG = 1
    TOO_MUCH_MEMORY = 2
    TOO_DEEP = 3


_END, _ANOTHER = 0, 3
"""Exit statuses of a child: after `_END` its parent ends without a reply, after `_ANOTHER` its parent forks another
child.
"""
# Signals that end a child at a limit. Rust code aborts if an allocation fails, and a stack overflow causes SIGSEGV.
_ENDED_BY: dict[int, Outcome] = {
    signal.SIGPROF: Outcome.TOO_LONG,
    signal.SIGABRT: Outcome.TOO_MUCH_MEMORY,
    signal.SIGSEGV: Outcome.TOO_DEEP,
}


def connect_to_the_front_end() -> Connection:
    """The connection to the front end. The limited process ends when this connection closes."""
    end_with_the_parent()
    leave_signals_to_the_parent()
    return Connection(0)


def serve(connection: Connection, answer: Callable[[bytes], bytes], most_kept: int) -> None:
    """Answer each piece of work, until the front end closes the connection or a child is killed from outside.

    A child whose resident memory has exceeded `most_kept` bytes ends, so that its memory is freed.
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
        if outcome is None and status != _ANOTHER:  # the front end then restarts this program and sends the work again
            return
        if outcome is not None:
            try:
                connection.send_bytes(bytes([outcome]))
            except OSError:  # the front end's process has ended
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
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))  # receiving the next piece of work may take more memory
