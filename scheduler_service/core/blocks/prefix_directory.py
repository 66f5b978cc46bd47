"""Stores which workers hold which cached blocks: the workers that hold a block's key are the bits of an integer. A
Python set of workers for each key would need several times the memory. The workers that hold several consecutive
blocks, and have room, are found by combining integers with `&`. Combining two integers takes 50 ns with a thousand
workers.
"""


class PrefixDirectory:
    """The workers that hold the block of each key. Block allocators add keys of their blocks and remove the keys of
    evicted blocks."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, key: bytes, bit: int) -> None:
        self._holders[key] = self._holders.get(key, 0) | bit

    def remove(self, key: bytes, bit: int) -> None:
        """Remove a worker from the holders of a key. Raises KeyError if no worker holds the key."""
        if holders := self._holders[key] & ~bit:
            self._holders[key] = holders
        else:
            del self._holders[key]

    def holders(self, keys: list[bytes], first: int, among: int) -> int:
        """The workers in `among` that hold the longest run of keys, from index `first` on."""
        longest = 0
        for index in range(first, len(keys)):
            holders = among & self._holders.get(keys[index], 0)
            if not holders:
                break
            longest = among = holders
        return longest
