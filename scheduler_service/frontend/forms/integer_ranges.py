"""Regular expressions for ranges of integers of any size, digit by digit."""


def integers_between(first: int | None, last: int | None) -> str:
    """An expression for the integers from `first` to `last`, inclusive, as JSON writes them, without -0."""
    parts = []
    if first is None or first < 0:
        parts.append(f"-{_between(1 if last is None or last >= 0 else -last, None if first is None else -first)}")
    if last is None or last >= 0:
        parts.append(_between(max(first or 0, 0), last))
    return _any(parts)


def _between(first: int, last: int | None) -> str:
    """An expression for integers from `first`, which is at least 0, to `last`."""
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
    """An expression for numbers between two bounds of equal length.

    It has their common prefix, then the values between the first digits that differ, then the rest of either bound.
    """
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
    """Expressions for numbers of the same length from `low` on; unless `is_head`, only those with its first digit.

    They are alternatives: nested expressions of a hundred digits would be too deep for llguidance.
    """
    places = [place for place in range(not is_head, len(low)) if low[place] != "9"]
    return [low, *(f"{low[:at]}[{int(low[at]) + 1}-9]{_any_digits(len(low) - at - 1)}" for at in places)]


def _up_to(high: str, *, is_head: bool = True) -> list[str]:
    """Expressions for numbers of the same length up to `high`, without leading 0; unless `is_head`, only those with
    its first digit.
    """
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
