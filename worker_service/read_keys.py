"""Reads a JSON object, such as config.json, with a type and limits for each value, and without silent conversion. The
caller refuses the keys that were not read."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

from worker_service.wording import named, shown

D = TypeVar("D")

LARGEST = 2**31
"""Default maximum of integers, such as the number of layers."""
_SMALLEST, _GREATEST = 1e-15, 1e15
"""Default limits of numbers: float32 can store the square and its inverse."""
REFUSED: Any = object()
"""`default` of a required key, and `null` of a key that must not be null."""


class ReadKeys:
    """A JSON object. Methods that read raise ValueError with the key's name for a value of another type or outside the
    limits.

    `default`: the result if the key is missing, which is otherwise refused. `null`: the result for null, which is
    otherwise refused. Nested objects are `ReadKeys`, too. `in` does not mark a key as read."""

    def __init__(self, json: "Mapping[str, Any] | ReadKeys", where: str = "") -> None:
        self.plain: Mapping[str, Any] = json.plain if isinstance(json, ReadKeys) else json
        """The plain mapping, whose use does not mark a key as read."""
        self._where = where
        """The names of enclosing objects, for error messages."""
        self._read: set[str] = set()
        self._within: dict[str, ReadKeys] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def __contains__(self, name: object) -> bool:
        return name in self.plain

    def boolean(self, name: str, default: bool | D = REFUSED, *, null: bool | D = REFUSED) -> bool | D:
        found: bool | D = self._value(name, default, null, "true or false", lambda value: type(value) is bool)
        return found

    def integer(
        self, name: str, default: int | D = REFUSED, *, null: int | D = REFUSED, least: int = 1, most: int = LARGEST
    ) -> int | D:
        """Read an integer. 2.0 is refused."""
        wanted = f"a whole number from {least} to {most}"
        found: int | D = self._value(
            name, default, null, wanted, lambda value: type(value) is int and least <= value <= most
        )
        return found

    def number(
        self,
        name: str,
        default: float | D = REFUSED,
        *,
        null: float | D = REFUSED,
        least: float = _SMALLEST,
        most: float = _GREATEST,
    ) -> float | D:
        """Read a finite number."""
        wanted = f"a number from {least:g} to {most:g}"
        found: float | D = self._value(name, default, null, wanted, lambda value: _is_number(value, least, most))
        return found

    def choice(
        self, name: str, options: Collection[str], default: str | D = REFUSED, *, null: str | D = REFUSED
    ) -> str | D:
        found: str | D = self._value(name, default, null, _one_of(options), lambda value: _is_of(value, options))
        return found

    def choices(self, name: str, options: Collection[str], count: int) -> list[str] | None:
        """None if the key is missing or null."""
        wanted = f"a list of {count}, each of which is {_one_of(options)}"
        found: list[str] | None = self._list(name, wanted, lambda value: _is_of(value, options), count)
        return found

    def integers(self, name: str, count: int | None = None, *, least: int, most: int) -> list[int] | None:
        """Any number of integers if `count` is None. Returns None if the key is missing or null."""
        wanted = f"a list of {'' if count is None else f'{count} '}whole numbers from {least} to {most}"
        found: list[int] | None = self._list(
            name, wanted, lambda value: type(value) is int and least <= value <= most, count
        )
        return found

    def numbers(self, name: str, count: int) -> list[float]:
        """The key is required."""
        wanted = f"a list of {count} numbers from {_SMALLEST:g} to {_GREATEST:g}"
        found: list[float] | None = self._list(
            name, wanted, lambda value: _is_number(value, _SMALLEST, _GREATEST), count
        )
        if found is None:
            raise self._other(name, wanted)
        return found

    def group(self, name: str) -> "ReadKeys":
        """A nested object, empty if the key is missing or null."""
        found: Mapping[str, Any] | None = self._value(
            name, None, None, "an object", lambda value: isinstance(value, Mapping)
        )
        return self._within.setdefault(name, ReadKeys(found or {}, f"{self._where}{named(name)}."))

    def without_effect(self, *names: str) -> None:
        """Mark keys as read whose values may be ignored."""
        for name in names:
            self._read.add(name)
            self._within.pop(name, None)

    def neutral(self, **values: object) -> None:
        """Mark keys as read that have the given values, which the caller already implements."""
        self.without_effect(*(name for name, value in values.items() if _is_same(self.plain.get(name), value)))

    def unread(self) -> dict[str, Any]:
        """The keys that were not read, such as "rope_scaling.factor". Values without effect (null, {} and []) are left
        out."""
        found = {name: value for name, value in self.plain.items() if name not in self._read}
        for name, within in self._within.items():
            found |= {f"{name}.{key}": value for key, value in within.unread().items()}
        return {name: value for name, value in found.items() if value not in (None, {}, [])}

    def _value(self, name: str, default: Any, null: Any, wanted: str, fits: Callable[[Any], bool]) -> Any:
        self._read.add(name)
        if name not in self.plain:
            if default is REFUSED:
                raise ValueError(f"{self._where}{name} is missing; it must be {wanted}")
            return default
        value: Any = self.plain[name]
        if value is None and null is not REFUSED:
            return null
        if not fits(value):
            raise self._other(name, wanted)
        return value

    def _list(self, name: str, wanted: str, fits: Callable[[Any], bool], count: int | None) -> Any:
        def all_fit(value: object) -> bool:
            return isinstance(value, list) and count in (None, len(value)) and all(map(fits, value))

        return self._value(name, None, None, wanted, all_fit)

    def _other(self, name: str, wanted: str) -> ValueError:
        return ValueError(f"{self._where}{name} is {shown(self.plain.get(name))}; it must be {wanted}")


def _is_number(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and least <= value <= most


def _one_of(options: Collection[str]) -> str:
    return " or ".join(sorted(options))


def _is_of(value: object, options: Collection[str]) -> bool:
    return isinstance(value, str) and value in options


def _is_same(found: object, value: object) -> bool:
    """Equality of JSON values: unlike in Python, true and 1 differ."""
    return (type(found) is bool) is (type(value) is bool) and found == value
