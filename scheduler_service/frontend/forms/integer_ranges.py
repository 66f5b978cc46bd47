"""Regular expressions for the integers of a range, digit by digit. Integers may have any size."""


def integers_between(first: int | None, last: int | None) -> str:
    """A regular expression for the integers from `first` to `last`, inclusive, in JSON's notation and without -0."""
    parts = []
    if first is None or first < 0:
        parts.append(f"-{_between(1 if last is None or last >= 0 else -last, None if first is None else -first)}")
    if last is None or last >= 0:
        parts.append(_between(max(first or 0, 0), last))
    return _any(parts)


def _between(first: int, last: int | None) -> str:
    low = str(first)
    if last is None:
        return _any([*_from(low), f"[1-9][0-9]{{{len(low)},}}"])
    high = str(last)
    if len(low) == len(high):
        return _of_length(low, high)
    parts = [*_from(low), *_up_to(high)]
    if len(high) - len(low) > 1:
        parts.append(f"[1-9][0-9]{{{len(low)},{len(high) - 2}}}")
    return _any(parts)


def _of_length(low: str, high: str) -> str:
    """Alternatives after the common prefix: the lower bound's digit, the digits in between, the upper bound's."""
    if low == high:
        return low
    place = next(place for place, (one, other) in enumerate(zip(low, high, strict=True)) if one != other)
    head, rest = low[:place], len(low) - place - 1
    first, last = int(low[place]) + 1, int(high[place]) - 1
    parts = [*_from(low[place:], is_head=False), *_up_to(high[place:], is_head=False)]
    if first <= last:
        parts.append(f"[{first}-{last}]{_any_digits(rest)}")
    return head + _any(parts)


def _from(low: str, *, is_head: bool = True) -> list[str]:
    """Alternatives, not nested (too deep for llguidance), for integers from `low` on with as many digits.

    Without `is_head`, they also have its first digit.
    """
    places = [place for place in range(not is_head, len(low)) if low[place] != "9"]
    return [low, *(f"{low[:at]}[{int(low[at]) + 1}-9]{_any_digits(len(low) - at - 1)}" for at in places)]


def _up_to(high: str, *, is_head: bool = True) -> list[str]:
    """Alternatives for integers up to `high` with as many digits; without `is_head`, also with its first digit."""
    least = [int(is_head and not place) for place in range(len(high))]
    places = [place for place in range(not is_head, len(high)) if int(high[place]) > least[place]]
    return [
        high,
        *(f"{high[:at]}[{least[at]}-{int(high[at]) - 1}]{_any_digits(len(high) - at - 1)}" for at in places),
    ]


def _any_digits(number: int) -> str:
    return f"[0-9]{{{number}}}" if number else ""


def _any(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"
