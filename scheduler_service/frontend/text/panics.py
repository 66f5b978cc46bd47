"""Turns the failures of the tokenizers library into exceptions."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class PanicError(RuntimeError):
    """An internal failure of the tokenizers library."""


def without_panic(function: Callable[[], T]) -> T:
    """Call a Rust function. Raises PanicError instead of the library's panic, which is not an `Exception`."""
    try:
        return function()
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # the class PanicException cannot be imported
            raise PanicError(f"the tokenizers library has failed: {error}") from None
        raise
