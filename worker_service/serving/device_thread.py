"""The thread that uses a worker's device, and runs submitted work in order."""

import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")

_LOOK_SECONDS = 1e-4
"""Seconds between two checks whether the device has finished pending work."""


class Pending(ABC, Generic[Result]):
    """Launched work that the device is still computing. `settle` puts the result into `future`."""

    def __init__(self) -> None:
        self.future: Future[Result] = Future()

    @abstractmethod
    def is_done(self) -> bool:
        """Whether `finish` would return without waiting."""

    @abstractmethod
    def finish(self) -> Result:
        """Wait for the device, and return the result."""

    @property
    def is_settled(self) -> bool:
        return self.future.done()

    def is_due(self) -> bool:
        """Whether `settle` would return without waiting. True if `is_done` raises an error."""
        try:
            return self.is_settled or self.is_done()
        # `finish` raises the error again.
        except Exception:
            return True

    def settle(self) -> None:
        """Wait for the device and set the future, unless it is set. Only the device thread may call this method."""
        if self.is_settled:
            return
        try:
            self.future.set_result(self.finish())
        except BaseException as error:
            self.future.set_exception(error)


class DeviceThread:
    """Runs work in a daemon thread, so that the process can exit while the thread is busy.

    If work returns a `Pending`, the thread settles it when the device has finished, and may run other work before."""

    def __init__(self) -> None:
        # Not SimpleQueue: in CPython 3.11, its `get` computes what is left of a timeout after it found the queue empty.
        # If another program delayed the thread just before, the rest is negative, and `get` waits for ever.
        self._work: queue.Queue[tuple[Future[Any], Callable[[], Any]]] = queue.Queue()
        self._last: Future[Any] | None = None
        self._pending: deque[Pending[Any]] = deque()
        threading.Thread(target=self._run, name="device", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether all submitted work is done or cancelled."""
        return self._last is None or self._last.done()

    def submit(self, work: Callable[[], Result | Pending[Result]]) -> "Future[Result]":
        """Run `work` after all work submitted before. Returns a future for the result or exception."""
        future: Future[Result] = Future()
        self._last = future
        self._work.put((future, work))
        return future

    def _run(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                self._do(*self._work.get(timeout=_LOOK_SECONDS if self._pending else None))
            while self._pending and self._pending[0].is_due():
                self._pending.popleft().settle()

    def _do(self, future: Future[Any], work: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
            return
        if isinstance(result, Pending):
            result.future = future
            self._pending.append(result)
        else:
            future.set_result(result)
