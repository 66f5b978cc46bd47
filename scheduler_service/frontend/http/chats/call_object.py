"""The arguments of a tool call as one JSON object, for APIs that do not have arguments as text."""

import json
import math
import re
from typing import Any, NoReturn

_OUTSIDE = re.compile(r'["{}\[\],:]')
_INSIDE = re.compile(r'["\\]')
_CLOSERS = {"{": "}", "[": "]"}
MAX_DIGITS = 300
"""Digits of the largest integer that stays an integer."""


class CallObject:
    """Collects the text of a call's arguments. A call that was cut has the parts that the model has completed."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._closers: list[str] = []
        self._is_key: list[bool] = []
        self._in_string = self._skips_one = False
        self._completed_end = 0  # the text up to here is an object, if all that is open is closed behind it

    def add(self, text: str) -> None:
        """Add text. The time is linear in the text's length."""
        self._parts.append(text)
        at = 0
        while at < len(text):
            at = self._string(text, at) if self._in_string else self._structure(text, at)
        self._length += len(text)

    def text(self) -> str:
        """The object as JSON text. A number at the end of a cut call has the digits that the model has written."""
        whole, closers = "".join(self._parts), "".join(reversed(self._closers))
        for part in (whole, whole[: self._completed_end]):
            if _is_object(part + closers):
                return part + closers
        return "{}"

    def value(self) -> dict[str, Any]:
        """The object. Numbers that no float64 holds are texts."""
        found: dict[str, Any] = json.loads(self.text(), parse_int=_number, parse_float=_number)
        return found

    def _string(self, text: str, at: int) -> int:
        if self._skips_one:
            self._skips_one = False
            return at + 1
        found = _INSIDE.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._skips_one = True
        else:
            self._in_string = False
            if self._is_key and not self._is_key[-1]:
                self._completed(found.end())
        return found.end()

    def _structure(self, text: str, at: int) -> int:
        found = _OUTSIDE.search(text, at)
        if found is None:
            return len(text)
        match found[0]:
            case '"':
                self._in_string = True
            case "{" | "[" as opening:
                self._closers.append(_CLOSERS[opening])
                self._is_key.append(opening == "{")
                self._completed(found.end())
            case "}" | "]" if self._closers:
                self._closers.pop()
                self._is_key.pop()
                self._completed(found.end())
            case "," if self._closers:
                self._completed(found.start())
                self._is_key[-1] = self._closers[-1] == "}"
            case ":" if self._closers:
                self._is_key[-1] = False
        return found.end()

    def _completed(self, end: int) -> None:
        """Note a completed part. Every bracket completes a part, so `_closers` are those behind the last part."""
        self._completed_end = self._length + end


def _is_object(text: str) -> bool:
    try:
        # Numbers stay text, because Python refuses to convert long numbers.
        found: Any = json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict)


def _number(text: str) -> int | float | str:
    number = float(text)
    if not math.isfinite(number):
        return text
    return number if number % 1 or len(text) > MAX_DIGITS or not text.lstrip("-").isdigit() else int(text)


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
