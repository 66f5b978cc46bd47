"""Rewrites the numbers in a JSON schema so that every output that llguidance 1.9 allows is valid.

llguidance reads numbers as doubles and integers in 64 bits, and allows an excluded integer bound of a range shorter
than 1. Bounds are therefore rounded inward to numbers that it handles correctly.

Numbers that cannot be rounded raise `NumberError`, and schema_grammar.py then writes a grammar: inexact values of
`const` and `enum`, and bounds that would lose too many integers.
"""

import math
from collections.abc import Iterator
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, NamedTuple, TypeGuard, TypeVar

from scheduler_service.frontend.forms.schema_text import ANNOTATIONS, SCHEMAS_BY_NAME, SchemaError, path_to

MAX_INTEGER = (1 << 63) - 1024
"""The largest double below 2^63."""
DIGITS, DECIMALS = 15, 18
"""Significant decimal digits that every double holds, and decimals that llguidance reads of a bound."""
MAX_NUMBER = Decimal("9.2e18")
"""The largest bound of a range: llguidance reads the digits before the decimal point as a 64-bit integer."""
FULL = 10**18
"""The smallest lower bound that requires an upper bound: outputs could have more digits than 64 bits hold."""
MAX_LOST = 1 << 10
"""Rounding the bounds of a range may lose at most 1 of 1,024 integers."""
MAX_MULTIPLE = 1 << 32

_MERGING = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties")
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


class NumberError(SchemaError):
    """The schema contains a number that llguidance cannot read."""


_N = TypeVar("_N", int, Decimal)


class _Bound(NamedTuple):
    """A lower bound of a range. An upper bound is negated and stored as a lower bound."""

    value: int | Decimal
    is_excluded: bool


def rewrite_numbers(schema: Any) -> Any:
    """Round the bounds of numbers in a schema, and remove annotations. Raises SchemaError."""
    found = _rewritten(schema, "#")
    _check_multiples(schema)
    return found


def _rewritten(node: Any, path: str) -> Any:
    if isinstance(node, list):
        return [_rewritten(part, path_to(path, number)) for number, part in enumerate(node)]
    if not isinstance(node, dict):
        return node
    found: dict[str, Any] = {}
    for keyword, value in node.items():
        if keyword in SCHEMAS_BY_NAME and isinstance(value, dict):
            found[keyword] = {name: _rewritten(part, path_to(path, keyword, name)) for name, part in value.items()}
        elif keyword in ("const", "enum"):
            _check_values(value, path_to(path, keyword))
            found[keyword] = value
        elif keyword not in (*ANNOTATIONS, *_BOUNDS) and not keyword.startswith("x-"):
            found[keyword] = _rewritten(value, path_to(path, keyword))
    if "multipleOf" in node:
        _check_multiple(node["multipleOf"], path_to(path, "multipleOf"))
    low = _bound(node, "minimum", "exclusiveMinimum", 1, path)
    high = _bound(node, "maximum", "exclusiveMaximum", -1, path)
    if low or high:
        is_integer = _is_integer(node.get("type"))
        ends = (_integers if is_integer else _numbers)(low, high, path)
        found |= {name: end for name, end in zip(("minimum", "maximum"), ends, strict=True) if end is not None}
    return found


def _is_integer(types: Any) -> bool:
    return types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types)


def _bound(node: dict[str, Any], plain: str, excluding: str, sign: int, path: str) -> _Bound | None:
    """The tighter of a schema's inclusive and exclusive bounds. An upper bound (`sign` -1) is returned negated."""
    value, excluded = node.get(plain), node.get(excluding)
    if isinstance(excluded, bool):  # in JSON Schema draft 4, this keyword is a boolean
        value, excluded = (None, value) if excluded else (value, None)
    bounds = []
    for keyword, number in ((plain, value), (excluding, excluded)):
        if number is not None:
            if not _is_number(number):
                raise SchemaError(f"{path_to(path, keyword)} is not a number")
            bounds.append(_Bound(number if sign > 0 else _negative(number), keyword == excluding))
    return max(bounds, default=None)


def _negative(value: int | Decimal) -> int | Decimal:
    return value.copy_negate() if isinstance(value, Decimal) else -value  # unary minus would round a Decimal


def _is_number(value: Any) -> TypeGuard[int | Decimal]:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _integers(low: _Bound | None, high: _Bound | None, path: str) -> tuple[int | None, int | None]:
    """The first and the last integer within the bounds that a double represents exactly."""
    wanted = [None if end is None else _first_integer(end) for end in (low, high)]
    ends = [None if end is None else _next_double(max(end, -MAX_INTEGER)) for end in wanted]
    _close(ends, MAX_INTEGER, path)
    first, last = ends
    if first is not None and last is not None:
        lost = sum(new - old for new, old in zip(ends, wanted, strict=True) if new is not None and old is not None)
        if lost * MAX_LOST > 1 - last - first:
            raise NumberError(
                f"{path} has bounds beyond 2^53 (minimum, maximum) between which too few integers can be written"
            )
    return first, None if last is None else -last


def _first_integer(bound: _Bound) -> int:
    first = math.ceil(bound.value)
    return first + 1 if bound.is_excluded and first == bound.value else first


def _next_double(value: int) -> int:
    """The smallest integer of at least `value` that a double represents exactly."""
    unit = 1 << max(abs(value).bit_length() - 53, 0)
    return -(-value // unit) * unit


def _numbers(low: _Bound | None, high: _Bound | None, path: str) -> tuple[Decimal | None, Decimal | None]:
    """Inclusive bounds with so few digits that llguidance reads them exactly."""
    ends = [None if end is None else _first_number(end) for end in (low, high)]
    _close(ends, MAX_NUMBER, path)
    first, last = ends
    return first, None if last is None else -last + 0  # `+ 0` converts -0 to 0


def _first_number(bound: _Bound) -> Decimal:
    value = max(Decimal(bound.value), -MAX_NUMBER)
    rounded = Context(prec=DIGITS, rounding=ROUND_CEILING).plus(value)
    if rounded.adjusted() - len(rounded.as_tuple().digits) + 1 < -DECIMALS:
        rounded = rounded.quantize(Decimal(1).scaleb(-DECIMALS), rounding=ROUND_CEILING)
    if bound.is_excluded and rounded == value:
        rounded += Decimal(1).scaleb(max(rounded.adjusted() - DIGITS + 1 if rounded else -DIGITS, -DECIMALS))
    return rounded + 0


def _close(ends: "list[_N | None]", most: "_N", path: str) -> None:
    """Add a range's missing bound, which llguidance requires if the existing bound is at least `FULL`."""
    for number, end in enumerate(ends):
        if end is not None and end > most:
            raise NumberError(f"{path} has a bound beyond {most:.4g}, behind which no number can be written")
        if end is not None and end >= FULL and ends[1 - number] is None:
            ends[1 - number] = -most


def _check_values(value: Any, path: str) -> None:
    """Raises NumberError for a value of `const` or `enum` that llguidance would change: it writes the fewest digits."""
    for number, where in _numbers_in(value, path):
        if number != int(number):
            is_exact = Decimal(repr(float(number))) == number
        else:
            is_exact = abs(int(number)) <= MAX_INTEGER and int(float(number)) == number
        if not is_exact:
            raise NumberError(f"{where} is {number}, which has too many digits; use a string instead")


def _numbers_in(value: Any, path: str) -> Iterator[tuple[int | Decimal, str]]:
    if _is_number(value):
        yield value, path
    elif isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers_in(part, path_to(path, name))


def _check_multiple(value: Any, path: str) -> None:
    """llguidance multiplies the double by 10 until it is an integer, which must fit 32 bits. Raises SchemaError."""
    if not _is_number(value) or value <= 0:
        raise SchemaError(f"{path} is not a number above 0")
    if _multiple(value) is None:
        raise SchemaError(
            f"{path} is {value}, which is not supported: it has too many digits, or is not exactly a double"
        )


def _multiple(value: int | Decimal) -> tuple[int, int] | None:
    """The `multipleOf` as llguidance's integer / 10**exponent; None if inexact, or if the integer is too large."""
    if value >= MAX_MULTIPLE:
        return None
    read, exponent = float(value), 0
    while read % 1:
        read, exponent = read * 10, exponent + 1
    if read >= MAX_MULTIPLE or Decimal(int(read)).scaleb(-exponent) != value:
        return None
    return int(read), exponent


def _check_multiples(schema: Any) -> None:
    """Raises SchemaError if merged `multipleOf` values may exceed 32 bits: llguidance merges them without a check."""
    keywords = {*_keywords_in(schema)}
    found = (_multiple(value) for keyword, value in keywords if keyword == "multipleOf" and value is not None)
    multiples = [multiple for multiple in found if multiple]
    decimals = max((exponent for _, exponent in multiples), default=0)
    numbers = [number * 10 ** (decimals - exponent) for number, exponent in multiples]
    may_merge = any(keyword in _MERGING for keyword, _ in keywords)
    if may_merge and math.lcm(*numbers) * max(numbers, default=1) >= MAX_MULTIPLE:
        raise SchemaError(f"its multiples (multipleOf) are too large together with {', '.join(_MERGING)}")


def _keywords_in(node: Any) -> Iterator[tuple[str, int | Decimal | None]]:
    """Keys and values of all objects of the schema; None for a value that is not a number."""
    if isinstance(node, dict):
        for keyword, value in node.items():
            yield keyword, value if _is_number(value) else None
            yield from _keywords_in(value)
    elif isinstance(node, list):
        for value in node:
            yield from _keywords_in(value)
