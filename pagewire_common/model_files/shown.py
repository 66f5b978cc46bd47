"""Quotes a value from an untrusted file in an error, on one line and shortened."""

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlong = 30
_SHORT.maxlist = 8


def shown(value: object) -> str:
    """A value as Python's repr. The middle of a long repr is left out."""
    return _SHORT.repr(value)
