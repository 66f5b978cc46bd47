"""Which workers hold which cached prefix: for every key of a findable block, its holders as the bits of a number.

A set for each key would take several times the memory, and to find those that hold one block after another, and have
room besides, bits are combined with `&`: at a thousand workers 50 ns.
"""


class PrefixDirectory:
    """Kept by the block allocators, which say what became findable on their worker and what was given up."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, key: bytes, bit: int) -> None:
        self._holders[key] = self._holders.get(key, 0) | bit

    def remove(self, key: bytes, bit: int) -> None:
        """Raises KeyError when no worker holds the key."""
        if holders := self._holders[key] & ~bit:
            self._holders[key] = holders
        else:
            del self._holders[key]

    def holders(self, keys: list[bytes], first: int, among: int) -> int:
        """The workers `among` which hold the most blocks in a row from the block of the `first` key on."""
        longest = 0
        for index in range(first, len(keys)):
            holders = among & self._holders.get(keys[index], 0)
            if not holders:
                break
            longest = among = holders
        return longest
