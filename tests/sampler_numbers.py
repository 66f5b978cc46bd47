"""Values for every number of the sampler, from the table in `pagewire_common.sampling`."""

import math
from ctypes import c_float
from random import Random

from pagewire_common.sampling import NUMBERS

FLOATS = tuple(name for name, number in NUMBERS.items() if number.kind is float)


def drawn(name: str, draw: Random) -> float:
    """A 32-bit value within the bounds, at most 2 or, of integers, 40."""
    kind, _, (low, high, *_), *_ = NUMBERS[name]
    if kind is int:
        return draw.randint(int(low) + 1, 40)
    return c_float(low + (min(high, 2.0) - low) * (1 - draw.random())).value


OTHERS = {name: drawn(name, Random(name)) for name in NUMBERS}
"""One value of each that is not its default."""
BEYOND = [
    (name, value)
    for name, (kind, _, (low, high, excludes_low), *_) in NUMBERS.items()
    for value in (
        *([] if kind is int else [math.nan, math.inf, -math.inf, low - 0.5, high + 1]),
        *([low] if excludes_low else []),
    )
]
"""Invalid values of each; integers have no negative ones."""
