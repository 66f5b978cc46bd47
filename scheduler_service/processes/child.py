"""A child process, and the pipe on which it says that it is ready. The pipe's end is the child's end."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, Protocol

from pagewire_common.processes.child_process import end_with_the_parent

FRONT_END = "scheduler_service.frontend"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""The signals that a keeper handles."""


class Process(Protocol):
    """The part of `subprocess.Popen` that a keeper needs."""

    pid: int

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


class ForkedProcess:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)  # until `wait`, the pid belongs to this child


class Child:
    """`pipe`: the reading end of the child's pipe, which `close` closes."""

    def __init__(self, process: Process, pipe: int) -> None:
        self.process = process
        self.pipe = pipe
        self.is_ready = False

    def read(self) -> int | None:
        """Read what the child has said, when its pipe is readable. Returns the exit status of a child that has ended,
        negative after a signal.
        """
        if os.read(self.pipe, 64):
            self.is_ready = True
            return None
        os.close(self.pipe)
        return self.process.wait()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


def start_front_end(arguments: Sequence[str], pipe: int) -> Process:
    """Start a front end whose stdin is the writing end of `pipe`. Raises OSError."""
    return subprocess.Popen([sys.executable, "-m", FRONT_END, *arguments], stdin=pipe, start_new_session=True)


def spawn(start: Callable[[int], Process]) -> Child:
    """Start a child with the writing end of a new pipe. Raises OSError."""
    ours, theirs = os.pipe()
    try:
        return Child(start(theirs), ours)
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)


def fork(main: Callable[[int], None]) -> Callable[[int], Process]:
    """Run `main`, with the writing end of a pipe, in a fork of this process. This process must have no threads."""

    def start(pipe: int) -> Process:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the child has handlers of its own
        pid = os.fork()
        if not pid:
            _become(main, pipe, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return ForkedProcess(pid)

    return start


def _become(main: Callable[[int], None], pipe: int, mask: Iterable[int]) -> NoReturn:
    """Run `main` as a process would, and exit without the cleanup of the parent's `with` blocks."""
    status: int | str | None = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.setsid()
        end_with_the_parent()
        main(pipe)
        status = 0
    except SystemExit as ending:
        status = ending.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    if isinstance(status, str):
        sys.stderr.write(f"{status}\n")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)
