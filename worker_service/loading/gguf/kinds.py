"""Kinds of values of GGUF keys: a type and, for numbers, a range. Kinds of floats accept whole numbers. Booleans, NaN
and infinity are never valid numbers."""

import math
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bool, int, float, str)

_LARGEST = 2**31 - 1
"""Maximum of sizes and counts, which llama.cpp stores in 32 bits."""
_SMALLEST = math.ulp(0.0)


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """Numbers from `least` to `most`. `title`: a valid value in error messages."""

    type: type[T]
    title: str
    least: float = -math.inf
    most: float = math.inf

    def read(self, value: object) -> T | None:
        """The converted value, or None if invalid."""
        found: Any = float(value) if self.type is float and type(value) is int else value
        if type(found) is not self.type:
            return None
        if isinstance(found, int | float) and not (math.isfinite(found) and self.least <= found <= self.most):
            return None
        return found

    def wrong(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The invalid numbers of an array."""
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
