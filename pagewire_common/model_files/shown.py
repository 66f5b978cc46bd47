"""Quotes a value from an untrusted file in an error, on one line and shortened."""

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlong = 30
_SHORT.maxlist = 8


def shown(value: object) -> str:
    """A value's repr, without the middle of a long one."""
    return _SHORT.repr(value)
