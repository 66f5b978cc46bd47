"""The one thread that owns the device. It runs what it is given in order, while the event loop does its own work."""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")

_LOOK_SECONDS = 1e-4
"""How often to look whether the device has finished."""


class Later(Generic[Result]):
    """What work returns while the device still computes: `future` has its result after `settle`."""

    def __init__(self, is_done: Callable[[], bool], finish: Callable[[], Result]) -> None:
        """finish: waits where `is_done` is not true yet."""
        self.future: Future[Result] = Future()
        self._is_done = is_done
        self._finish = finish

    @property
    def is_settled(self) -> bool:
        return self.future.done()

    def is_due(self) -> bool:
        """Whether `settle` would return at once. A device that raises an error when asked counts as done."""
        try:
            return self.is_settled or self._is_done()
        except Exception:  # `finish` raises it again, and the future then holds it
            return True

    def settle(self) -> None:
        """Finish now, unless it has been done before. On the device thread."""
        if self.is_settled:
            return
        try:
            self.future.set_result(self._finish())
        except BaseException as error:
            self.future.set_exception(error)


class DeviceThread:
    """A single worker thread. Unlike an executor's it is a daemon: a process may end while it is busy.

    Work may return a `Later`. It is settled when it is due, and other work may run before that.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        self._later: deque[Later[Any]] = deque()
        threading.Thread(target=self._run, name="device", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether everything submitted so far is done or cancelled."""
        return self._last is None or self._last.done()

    def submit(self, work: Callable[[], Result | Later[Result]]) -> "Future[Result]":
        """Run `work` after everything submitted before; the future carries its result or exception."""
        future: Future[Result] = Future()
        self._last = future
        self._work.put((future, work))
        return future

    def _run(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                self._do(*self._work.get(timeout=_LOOK_SECONDS if self._later else None))
            while self._later and self._later[0].is_due():
                self._later.popleft().settle()

    def _do(self, future: Future[Any], work: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
            return
        if isinstance(result, Later):
            result.future = future
            self._later.append(result)
        else:
            future.set_result(result)
