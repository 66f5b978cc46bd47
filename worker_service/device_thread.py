"""The one thread that owns the device. It runs what it is given in order, while the event loop does its own work."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class DeviceThread:
    """A single worker thread. Unlike an executor's it is a daemon: a process may end while it is busy."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        threading.Thread(target=self._run, name="device", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether everything submitted so far is done or cancelled."""
        return self._last is None or self._last.done()

    def submit(self, work: Callable[[], Result]) -> "Future[Result]":
        """Run `work` after everything submitted before; the future carries its result or exception."""
        future: Future[Result] = Future()
        self._last = future
        self._work.put((future, work))
        return future

    def _run(self) -> None:
        while True:
            future, work = self._work.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
