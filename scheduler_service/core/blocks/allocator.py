"""Reference-counted blocks of one memory pool, whose free blocks are the prefix cache.

A block's key stands for the block's tokens and all tokens before them. If several blocks have the same key, the key
finds one of them. That block keeps its key and contents until the pool has no other free block.

A key is expected if a running sequence will compute its block in a step that is not planned yet.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

Content = bytes | int
"""A block's contents: its key, or the number of a block without a key."""


class Evictor:
    """Free blocks that can still be found. The block that was freed first is evicted first; all operations are O(1)."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def add(self, block: int) -> None:
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def evict(self) -> int:
        return self._blocks.popitem(last=False)[0]


class PrefixDirectory:
    """The workers that hold the block of each key, as the bits of an integer: a set needs several times the memory. An
    `&` of two integers takes 50 ns with a thousand workers."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, key: bytes, bit: int) -> None:
        self._holders[key] = self._holders.get(key, 0) | bit

    def remove(self, key: bytes, bit: int) -> None:
        if holders := self._holders[key] & ~bit:
            self._holders[key] = holders
        else:
            del self._holders[key]

    def holders(self, keys: list[bytes], first: int, among: int) -> int:
        """The workers in `among` that hold the longest run of keys from index `first` on."""
        longest = 0
        for index in range(first, len(keys)):
            holders = among & self._holders.get(keys[index], 0)
            if not holders:
                break
            longest = among = holders
        return longest


class BlockAllocator:
    """Allocates the blocks 0 … num_blocks - 1 of one pool. A device pool's `directory` is shared by all
    workers; `bit` stands for this worker in it."""

    def __init__(self, num_blocks: int, directory: PrefixDirectory | None = None, bit: int = 1) -> None:
        self.num_blocks = num_blocks
        self._directory = PrefixDirectory() if directory is None else directory
        self._bit = bit
        self._ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._parents: list[bytes] = [b""] * num_blocks  # the previous key in each block's chain
        self._children: dict[bytes, set[bytes]] = {}  # keys that find blocks, by previous key
        self._expected: dict[bytes, int] = {}  # number of sequences that will compute each key
        self._by_key: dict[Content, int] = {}
        # A stack: the block freed last is the most likely to be in a processor's cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictor = Evictor()
        self.num_lost = 0  # times that a key ceased to find a block
        self.changed: set[int] | None = None
        """Blocks whose holders or place in the cache have changed, collected for a viewer; None without a viewer."""

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._evictor)

    def allocate(self) -> int:
        """Allocate a block, with one holder. Raises KeyError if no block is free."""
        if self._free:
            block = self._free.pop()
        else:
            block = self._evictor.evict()
            self._forget(block)
        self._ref_counts[block] = 1
        if self.changed is not None:
            self.changed.add(block)
        return block

    def share(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            if block not in self._evictor:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._evictor.remove(block)
        self._ref_counts[block] += 1
        if self.changed is not None:
            self.changed.add(block)

    def free(self, block: int) -> None:
        """Remove one holder. Raises ValueError if the block is free."""
        if self._ref_counts[block] == 0:
            raise ValueError(f"block {block} is free already")
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if self._is_found(block):
                self._evictor.add(block)
            else:
                self._keys[block] = None
                self._free.append(block)
        if self.changed is not None:
            self.changed.add(block)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    @property
    def ref_counts(self) -> Sequence[int]:
        """The number of holders of each block, by block number."""
        return self._ref_counts

    @property
    def cached(self) -> Evictor:
        """The free blocks that can still be found."""
        return self._evictor

    @property
    def num_findable(self) -> int:
        return len(self._by_key)

    def publish(self, block: int, key: bytes, parent: bytes) -> None:
        """Give a held block its key, which may already find another block and goes on finding it. `parent` is the key
        of the block before, or the root."""
        if self._keys[block] is None:
            self._keys[block], self._parents[block] = key, parent
            if key not in self._by_key:
                self._by_key[key] = block
                self._directory.add(key, self._bit)
                if (children := self._children.get(parent)) is None:
                    self._children[parent] = {key}
                else:
                    children.add(key)

    def key(self, block: int) -> bytes | None:
        """The key of the block's contents, even if it finds another block."""
        return self._keys[block]

    def parent(self, block: int) -> bytes:
        return self._parents[block]

    def children(self, key: bytes) -> list[bytes]:
        """The keys after this key in a chain that find a block."""
        return [*self._children.get(key, ())]

    def expect(self, key: bytes) -> None:
        self._expected[key] = self._expected.get(key, 0) + 1
        self._directory.add(key, self._bit)

    def unexpect(self, key: bytes) -> None:
        if (others := self._expected[key] - 1) > 0:
            self._expected[key] = others
        else:
            del self._expected[key]
            if key not in self._by_key:
                self._directory.remove(key, self._bit)

    @property
    def num_expected_keys(self) -> int:
        return len(self._expected)

    def is_expected(self, key: bytes) -> bool:
        return key in self._expected

    def num_expected(self, keys: Iterable[bytes]) -> int:
        """Number of leading keys that are expected or find a block."""
        return sum(1 for _ in takewhile(lambda key: key in self._expected or key in self._by_key, keys))

    def withdraw(self, block: int) -> None:
        """Remove a block's key, if any, so that the block is not found any more."""
        if self._keys[block] is not None:
            if block in self._evictor:
                self._evictor.remove(block)
                self._free.append(block)
                if self.changed is not None:
                    self.changed.add(block)
            self._forget(block)

    def withdraw_all(self) -> None:
        """Remove all keys; held blocks stay held. A key takes 0.7 µs."""
        for block in range(self.num_blocks):
            self._forget(block)
        if self.changed is not None:
            self.changed.update(self._evictor)
        while self._evictor:
            self._free.append(self._evictor.evict())

    def _is_found(self, block: int) -> bool:
        key = self._keys[block]
        return key is not None and self._by_key.get(key) == block

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None and self._is_found(block):
            del self._by_key[key]
            self.num_lost += 1
            if key not in self._expected:
                self._directory.remove(key, self._bit)
            (children := self._children[self._parents[block]]).remove(key)
            if not children:
                del self._children[self._parents[block]]
        self._keys[block] = None

    def find(self, content: Content) -> int | None:
        return self._by_key.get(content)

    def end_of_run(self, keys: Sequence[bytes], start: int, end: int) -> int:
        """The first index from `start` to `end` whose key finds no block, or `end`."""
        found = self._by_key
        while start < end and keys[start] in found:
            start += 1
        return start

    def find_run(self, keys: Iterable[bytes]) -> list[int]:
        find = self._by_key.get
        blocks: list[int] = []
        for key in keys:
            if (block := find(key)) is None:
                break
            blocks.append(block)
        return blocks

    def num_held(self, blocks: Iterable[int], leaving: Mapping[int, int]) -> int:
        """Number of `blocks` that would still have a holder without `leaving[block]` of their holders."""
        ref_counts = self._ref_counts
        if not leaving:
            return sum(map(bool, map(ref_counts.__getitem__, blocks)))
        return sum(ref_counts[block] > leaving.get(block, 0) for block in blocks)

    def contents(self, blocks: Iterable[int]) -> list[Content]:
        """The contents of `blocks`, in their order. Numbers below 0 are returned unchanged."""
        keys = self._keys
        return [block if block < 0 else keys[block] or block for block in blocks]

    def num_holders(self, content: Content) -> int:
        block = self._by_key.get(content)
        return 0 if block is None else self._ref_counts[block]

    def num_taken(self, contents: Iterable[Content]) -> int:
        """Number of free blocks required to hold all `contents`."""
        find, ref_counts = self._by_key.get, self._ref_counts
        return sum((block := find(content)) is None or not ref_counts[block] for content in contents)

    def check(self) -> None:
        held = sum(count > 0 for count in self._ref_counts)
        assert self.num_free + held == self.num_blocks, f"{self.num_free} free + {held} held != {self.num_blocks}"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        for block in range(self.num_blocks):
            assert (block in self._evictor) == (self._is_found(block) and self._ref_counts[block] == 0)
        assert all(self._ref_counts[block] == 0 and self._keys[block] is None for block in self._free)
        assert all(self._keys[block] == key for key, block in self._by_key.items()), "a key leads to another block"
        by_parent = {(self._parents[block], key) for key, block in self._by_key.items()}
        assert by_parent == {(parent, key) for parent, keys in self._children.items() for key in keys}
