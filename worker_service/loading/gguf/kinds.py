"""Kinds of values that a key of a GGUF file may have. A kind is a type and, for numbers, a range.

A kind that accepts floating-point numbers also accepts whole numbers. The values true and false do not count as
numbers. NaN and infinity are never valid.
"""

import math
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bool, int, float, str)

_LARGEST = 2**31 - 1
"""Maximum of sizes and counts in a GGUF file. llama.cpp stores sizes and counts in 32 bits."""
_SMALLEST = math.ulp(0.0)


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """The type and the range of a key's valid values. `title`: description of a valid value in error messages. Valid
    numbers are at least `least` and at most `most`."""

    type: type[T]
    title: str
    least: float = -math.inf
    most: float = math.inf

    def read(self, value: object) -> T | None:
        """The value of a key converted to this kind's type, or None if the value is invalid."""
        found: Any = float(value) if self.type is float and type(value) is int else value
        if type(found) is not self.type:
            return None
        if isinstance(found, int | float) and not (math.isfinite(found) and self.least <= found <= self.most):
            return None
        return found

    def wrong(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The numbers of an array that are not valid values of this kind."""
        if values.dtype.kind not in {bool: "b", int: "iu", float: "iuf", str: ""}[self.type]:
            return values
        is_wrong: npt.NDArray[np.bool_] = ~(np.isfinite(values) & (self.least <= values) & (values <= self.most))
        return values[is_wrong]


FLAG = Kind(bool, "true or false")
TEXT = Kind(str, "a text")
COUNT = Kind(int, f"a whole number from 1 to {_LARGEST}", 1, _LARGEST)
SIZE = Kind(int, f"a whole number from 0 to {_LARGEST}", 0, _LARGEST)
WHOLE = Kind(int, "a whole number")
NUMBER = Kind(float, "a number")
POSITIVE = Kind(float, "a number above 0", _SMALLEST)
NOT_NEGATIVE = Kind(float, "a number of at least 0", 0)
