"""A thread for work that steps need later."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

NICENESS = 5
"""The difference to the niceness of steps. By Linux's table of weights, such a thread gets a quarter of a busy core."""


def yield_to_steps() -> None:
    """Lower the priority of the calling thread, where the system can."""
    thread_id = threading.get_native_id()
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + NICENESS)


class BackgroundThread:
    """Runs work in order, in a daemon thread, so that the process can exit while the thread is busy."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._num_threads = torch.get_num_threads()
        self.is_busy = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[], Result]) -> "Future[Result]":
        future: Future[Result] = Future()
        self._work.put((future, work))
        return future

    def _run(self) -> None:
        yield_to_steps()
        torch.set_num_threads(self._num_threads)
        while True:
            future, work = self._work.get()
            if not future.set_running_or_notify_cancel():
                continue
            self.is_busy = True
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            self.is_busy = False
            del future, work
