"""Expressions for the integers of a range, over their digits, of any size."""


def integers_between(first: int | None, last: int | None) -> str:
    """An expression for the integers from the first to the last, both included, as JSON has them, without -0."""
    parts = []
    if first is None or first < 0:
        parts.append(f"-{_between(1 if last is None or last >= 0 else -last, None if first is None else -first)}")
    if last is None or last >= 0:
        parts.append(_between(max(first or 0, 0), last))
    return _any(parts)


def _between(first: int, last: int | None) -> str:
    """Of integers from 0."""
    parts = []
    if last is None:
        last = 10 ** len(str(first)) - 1
        parts.append(f"[1-9][0-9]{{{len(str(last))},}}")
    for length in range(len(str(first)), len(str(last)) + 1):
        low = max(first, 10 ** (length - 1) if length > 1 else 0)
        parts.append(_of_length(str(low), str(min(last, 10**length - 1))))
    return _any(parts)


def _of_length(low: str, high: str) -> str:
    """Of texts of digits that are equally long: what they have in common, then what is between the first digits that
    differ, and the rest of either bound."""
    if not low or low == high:
        return low
    head, tail = low[0], len(low) - 1
    if head == high[0]:
        return head + _of_length(low[1:], high[1:])
    parts = []
    first, last = int(head), int(high[0])
    if low[1:] != "0" * tail:
        parts.append(head + _of_length(low[1:], "9" * tail))
        first += 1
    if high[1:] != "9" * tail:
        parts.append(high[0] + _of_length("0" * tail, high[1:]))
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + (f"[0-9]{{{tail}}}" if tail else ""))
    return _any(parts)


def _any(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"
