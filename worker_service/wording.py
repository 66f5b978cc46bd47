"""Words out of files that nobody has vouched for, made fit for a sentence: on one line, and not long."""

import reprlib

_MAX_NAME = 200
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlong = 30
_SHORT.maxlist = 8


def shown(value: object) -> str:
    """A value as Python writes it, its middle left out where it is long."""
    return _SHORT.repr(value)


def named(name: str) -> str:
    """A tensor's or a key's name as it is, or as `shown` where it is long or would break the line."""
    return name if name.isprintable() and 0 < len(name) <= _MAX_NAME else shown(name)
