"""Work on the device thread is done in order, one piece at a time, and its failures stay its own."""

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from worker_service.serving.device_thread import DeviceThread, Pending

Result = TypeVar("Result")


class Asked(Pending[Result]):
    """Done when the one function says so, with the result of the other."""

    def __init__(self, is_done: Callable[[], bool], finish: Callable[[], Result]) -> None:
        super().__init__()
        self._is_done, self._finish = is_done, finish

    def is_done(self) -> bool:
        return self._is_done()

    def finish(self) -> Result:
        return self._finish()


def test_work_is_done_in_order() -> None:
    thread, done = DeviceThread(), []
    futures = [thread.submit(lambda number=number: done.append(number)) for number in range(100)]  # type: ignore[misc]
    futures[-1].result(10)
    assert done == list(range(100))


def test_a_failure_reaches_its_future_and_nothing_else() -> None:
    thread = DeviceThread()
    failing, following = thread.submit(lambda: 1 // 0), thread.submit(lambda: "fine")
    assert following.result(10) == "fine"
    with pytest.raises(ZeroDivisionError):
        failing.result()


def test_cancelled_work_is_not_done() -> None:
    thread, gate, done = DeviceThread(), threading.Event(), []
    thread.submit(lambda: gate.wait(10))
    cancelled = thread.submit(lambda: done.append("cancelled"))
    last = thread.submit(lambda: done.append("last"))
    assert cancelled.cancel()
    assert not thread.idle
    gate.set()
    last.result(10)
    assert done == ["last"]
    assert thread.idle


def test_what_the_device_is_not_done_with_waits_and_other_work_goes_on() -> None:
    thread, done = DeviceThread(), threading.Event()
    later = thread.submit(lambda: Asked(done.is_set, lambda: "found"))
    assert thread.submit(lambda: "meanwhile").result(10) == "meanwhile"
    assert not later.done()
    done.set()
    assert later.result(10) == "found"


def test_a_result_can_be_settled_before_it_is_due() -> None:
    thread = DeviceThread()
    waiting: Asked[str] = Asked(lambda: False, lambda: "found")
    future = thread.submit(lambda: waiting)
    assert thread.submit(waiting.settle).result(10) is None
    assert future.result(0) == "found"


def test_results_that_come_late_can_be_failures_too() -> None:
    thread = DeviceThread()
    future = thread.submit(lambda: Asked(lambda: True, lambda: 1 // 0))
    with pytest.raises(ZeroDivisionError):
        future.result(10)
    assert thread.submit(lambda: "fine").result(10) == "fine"


def test_a_device_that_cannot_be_asked_fails_what_it_was_at_and_the_thread_goes_on() -> None:
    thread = DeviceThread()
    future = thread.submit(lambda: Asked(lambda: bool(1 // 0), lambda: 2 // 0))
    with pytest.raises(ZeroDivisionError):
        future.result(10)
    assert thread.submit(lambda: "fine").result(10) == "fine"
