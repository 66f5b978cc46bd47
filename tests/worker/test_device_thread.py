"""Work on the device thread is done in order, one piece at a time, and its failures stay its own."""

import threading

import pytest

from worker_service.device_thread import DeviceThread


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
