"""A JSON object that knows which of its keys were read, so that a reader cannot forget what a file says.

A reader takes what it needs with `[]` and `get`. What `unread` names afterwards was not understood.
"""

from collections.abc import Iterator, Mapping
from typing import Any


class ReadKeys(Mapping[str, Any]):
    """Objects within it are `ReadKeys` too. To look whether a key is there does not count as reading it."""

    def __init__(self, json: Mapping[str, Any]) -> None:
        self.plain: Mapping[str, Any] = json.plain if isinstance(json, ReadKeys) else json
        """The object itself: what is read from it counts as read nowhere."""
        self._read: set[str] = set()
        self._within: dict[str, ReadKeys] = {}

    def __getitem__(self, name: str) -> Any:
        value = self.plain[name]
        self._read.add(name)
        if not isinstance(value, Mapping):
            return value
        return self._within.setdefault(name, ReadKeys(value))

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def __len__(self) -> int:
        return len(self.plain)

    def __contains__(self, name: object) -> bool:
        return name in self.plain

    def without_effect(self, *names: str) -> None:
        """Count these keys as read: the reader knows that they change nothing."""
        for name in names:
            self._read.add(name)
            self._within.pop(name, None)

    def neutral(self, **values: object) -> None:
        """Count each key as read that has this value: the reader does what it says. Any other value stays unread."""
        self.without_effect(*(name for name, value in values.items() if self.plain.get(name) == value))

    def unread(self) -> dict[str, Any]:
        """The keys that were not read, as "rope_scaling.factor", with their values. Null, {} and [] say nothing."""
        found = {name: value for name, value in self.plain.items() if name not in self._read}
        for name, within in self._within.items():
            found |= {f"{name}.{key}": value for key, value in within.unread().items()}
        return {name: value for name, value in found.items() if value not in (None, {}, [])}
