"""Measures memory and CPU time of processes with all their descendants."""

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence

import psutil


def end_on_signals() -> None:
    """End on SIGTERM and SIGHUP as on Ctrl-C, so that child processes are stopped."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def _family(pids: Sequence[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        parent = psutil.Process(pid)
        yield from (parent, *parent.children(recursive=True))


def engine_process(scheduler: int) -> psutil.Process:
    """The engine's process of a running scheduler, which restarts it."""
    while True:
        for child in psutil.Process(scheduler).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "scheduler_service.frontend" not in child.cmdline():
                    return child


def memory_mib(pids: Sequence[int]) -> float:
    """Resident MiB of the processes and their descendants. Shared pages count once, if the operating system reports
    them.
    """
    infos = [process.memory_full_info() for process in _family(pids)]
    return sum(getattr(info, "pss", info.rss) for info in infos) / 2**20


def cpu_seconds(pids: Sequence[int], *, descendants: bool = True) -> float:
    processes = _family(pids) if descendants else map(psutil.Process, pids)
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))
