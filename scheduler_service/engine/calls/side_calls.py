"""Limits calls other than Generate, so that Generate stays fast."""

import contextlib
from collections.abc import Iterator

import grpc

from pagewire_common.calls.errors import RequestError


class SideCalls:
    """The limit of one kind of call. `what` names the kind in errors."""

    def __init__(self, what: str, *, max_calls: int, max_bytes: int) -> None:
        self._what = what
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._num_calls = 0
        self._num_bytes = 0

    @contextlib.contextmanager
    def place(self, num_bytes: int = 0) -> Iterator[None]:
        self.enter(num_bytes)
        try:
            yield
        finally:
            self.leave(num_bytes)

    def enter(self, num_bytes: int, *, is_checked: bool = True) -> None:
        """Raises RESOURCE_EXHAUSTED at a limit, if it `is_checked`; a call that is alone may exceed `max_bytes`."""
        if is_checked:
            self._check(num_bytes)
        self._num_calls += 1
        self._num_bytes += num_bytes

    def _check(self, num_bytes: int) -> None:
        if self._num_calls >= self._max_calls:
            self._refuse(f"{self._num_calls} {self._what} calls are in flight, which is the limit")
        if self._num_calls and self._num_bytes + num_bytes > self._max_bytes:
            self._refuse(
                f"{self._what} calls of {self._num_bytes} bytes are in flight, and this one has {num_bytes}; "
                f"together they may have {self._max_bytes}"
            )

    def leave(self, num_bytes: int) -> None:
        self._num_calls -= 1
        self._num_bytes -= num_bytes

    def _refuse(self, reason: str) -> None:
        raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{reason}; try again later")
