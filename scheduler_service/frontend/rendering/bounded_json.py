"""Parses the JSON texts of a chat, and limits the number and the depth of their values.

A rendering process calls `read`. Outside such a process, which has limits of CPU time and memory, a text of 1 MB would
hold the interpreter's lock for several milliseconds.
"""

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from scheduler_service.frontend.rendering.encoding_errors import TemplateError

MAX_DEPTH = 64
MAX_VALUES = 100_000
"""Largest number of JSON values in all texts of one chat. Copying a value takes 0.3 µs."""


def parse(name: str, text: str, *, allows_twice: bool = False) -> Any:
    """Parse a JSON text. Raises TemplateError, which names the text.

    `allows_twice`: an object may have a key twice; the last value counts.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=None if allows_twice else _once,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise TemplateError(f"{name} is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise TemplateError(f"{name} is not valid JSON: {error}") from None


class Copied(dict[str, Any]):
    """An object that `Values.copy` leaves as it is, because its parts are copied already."""

    __slots__ = ()


class Values:
    """Copies the parsed values of one chat, with `convert` applied to every text, names in objects included."""

    def __init__(self, convert: Callable[[str], str]) -> None:
        self._convert = convert
        self._left = MAX_VALUES

    def copy(self, name: str, value: Any, depth: int = 0) -> Any:
        """Copy a value. Raises TemplateError, which names the value, for values that are too many or too deep."""
        if isinstance(value, str):
            return self._text(name, value)
        if not isinstance(value, dict | list) or isinstance(value, Copied):
            return value
        if depth >= MAX_DEPTH:
            raise TemplateError(f"{name} is nested more than {MAX_DEPTH} levels deep")
        self._left -= len(value)
        if self._left < 0:
            raise TemplateError(f"{name} has too many values: the JSON texts of a chat have at most {MAX_VALUES:,}")
        if isinstance(value, list):
            return [self.copy(name, part, depth + 1) for part in value]
        return {self._text(name, key): self.copy(name, part, depth + 1) for key, part in value.items()}

    def _text(self, name: str, text: str) -> str:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise TemplateError(f"{name} has one half of a surrogate pair, which is no character") from None
        return self._convert(text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:32]} is too large a number")
    return number
