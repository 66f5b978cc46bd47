"""A process that ends knows whether its background thread is in work that cannot be interrupted."""

import threading

from worker_service.execution.images.background import BackgroundThread


def test_a_thread_is_busy_while_it_works_and_after_an_error_not() -> None:
    thread, begun, goes_on = BackgroundThread("test"), threading.Event(), threading.Event()
    assert not thread.is_busy

    def fail() -> None:
        begun.set()
        goes_on.wait()
        raise ValueError("not an image")

    failed = thread.submit(fail)
    begun.wait()
    assert thread.is_busy
    goes_on.set()
    assert isinstance(failed.exception(), ValueError)
    assert thread.submit(lambda: thread.is_busy).result()  # begins after the first is over
