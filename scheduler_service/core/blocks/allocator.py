"""Allocates the reference-counted blocks of one memory pool, whose free blocks are the prefix cache.

A block can have a key, which stands for the block's tokens and all tokens before them. A block receives its key when a
step that computes the block is planned. If several blocks have the same key, the key finds one of them. The block that
a key finds keeps its key and contents after its last holder has freed it. A free block can be found and held again
until the pool has no other free block.

A key is called expected if a running sequence will compute a block with this key, but no planned step computes it yet.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from scheduler_service.core.blocks.prefix_directory import PrefixDirectory

Content = bytes | int
"""The contents of a block, represented by its key. A block without a key is equal to no other block, and is represented
by its number."""


class Evictor:
    """Free blocks that can still be found, in the order of their eviction. Every operation is O(1).

    The block that was freed first is evicted first. A sequence frees its last block first, so that this block, which is
    the least likely to be shared, is evicted before its other blocks.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def add(self, block: int) -> None:
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def evict(self) -> int:
        return self._blocks.popitem(last=False)[0]


class BlockAllocator:
    """Allocates the block numbers 0 … num_blocks - 1. A block is free again when its last holder frees it.

    `directory` stores the keys that find a block or are expected, under the `bit` of this pool's worker.
    """

    def __init__(self, num_blocks: int, directory: PrefixDirectory | None = None, bit: int = 1) -> None:
        self.num_blocks = num_blocks
        self._directory = PrefixDirectory() if directory is None else directory
        self._bit = bit
        self._ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._parents: list[bytes] = [b""] * num_blocks  # The key before each block's key in the chain of keys.
        self._children: dict[bytes, set[bytes]] = {}  # Keys that find blocks, by the key before them in the chain.
        self._expected: dict[bytes, int] = {}  # Number of sequences that will compute a block with each key.
        self._by_key: dict[Content, int] = {}  # The block that each key finds; contains no block numbers as keys.
        # A stack of free blocks: the block that was freed last is the most likely to be in a processor's cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictor = Evictor()
        self.num_lost = 0  # number of times that a key ceased to find a block

    @property
    def num_free(self) -> int:
        """Unreferenced blocks, whether in the prefix cache or not."""
        return len(self._free) + len(self._evictor)

    def allocate(self) -> int:
        """Allocate a free block, which then has one holder. Raises KeyError if no block is free, so the caller reads
        `num_free` first."""
        if self._free:
            block = self._free.pop()
        else:
            block = self._evictor.evict()
            self._forget(block)
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a holder to a block that is held, or that `find` has just returned."""
        if self._ref_counts[block] == 0:
            if block not in self._evictor:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._evictor.remove(block)
        self._ref_counts[block] += 1

    def free(self, block: int) -> None:
        """Remove one holder of a block. Raises ValueError if the block is free."""
        if self._ref_counts[block] == 0:
            raise ValueError(f"block {block} is free already")
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if self._is_found(block):
                self._evictor.add(block)
            else:
                self._keys[block] = None
                self._free.append(block)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    @property
    def num_findable(self) -> int:
        """Number of blocks, held or free, that a key finds."""
        return len(self._by_key)

    def publish(self, block: int, key: bytes, parent: bytes) -> None:
        """Give a held block the key of its contents. If the key already finds another block, the key still finds that
        other block.

        `parent` is the key before `key` in the chain: the key of the block before, or the root.
        """
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
        """The key of the block's contents, even if the key finds another block."""
        return self._keys[block]

    def parent(self, block: int) -> bytes:
        """The key before this block's key in the chain. The block must have a key."""
        return self._parents[block]

    def children(self, key: bytes) -> list[bytes]:
        """The keys that follow this key in a chain and find a block."""
        return [*self._children.get(key, ())]

    def expect(self, key: bytes) -> None:
        """Note that one more sequence will compute a block with this key."""
        self._expected[key] = self._expected.get(key, 0) + 1
        self._directory.add(key, self._bit)

    def unexpect(self, key: bytes) -> None:
        """Note that a sequence has planned a block with this key, or will not compute it."""
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
        """Number of leading keys that are expected or that find a block."""
        return sum(1 for _ in takewhile(lambda key: key in self._expected or key in self._by_key, keys))

    def withdraw(self, block: int) -> None:
        """Remove a block's key, so that the block is not found any more. Does nothing if the block has no key."""
        if self._keys[block] is not None:
            if block in self._evictor:
                self._evictor.remove(block)
                self._free.append(block)
            self._forget(block)

    def withdraw_all(self) -> None:
        """Remove the keys of all blocks; held blocks stay held. Removing the key of a block takes 0.7 µs."""
        for block in range(self.num_blocks):
            self._forget(block)
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
        """The block, held or free, that this key finds; None if there is none."""
        return self._by_key.get(content)

    def end_of_run(self, keys: Sequence[bytes], start: int, end: int) -> int:
        """The first index from `start` on whose key finds no block, at most `end`."""
        found = self._by_key
        while start < end and keys[start] in found:
            start += 1
        return start

    def find_run(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks that these keys find, up to the first key that finds no block."""
        find = self._by_key.get
        blocks: list[int] = []
        for key in keys:
            if (block := find(key)) is None:
                break
            blocks.append(block)
        return blocks

    def num_held(self, blocks: Iterable[int], leaving: Mapping[int, int]) -> int:
        """Number of these blocks that still have a holder, after `leaving[block]` holders have freed each block."""
        ref_counts = self._ref_counts
        if not leaving:
            return sum(map(bool, map(ref_counts.__getitem__, blocks)))
        return sum(ref_counts[block] > leaving.get(block, 0) for block in blocks)

    def contents(self, blocks: Iterable[int]) -> list[Content]:
        """The contents of these blocks. A number below 0 is not a block, and is returned unchanged."""
        keys = self._keys
        return [block if block < 0 else keys[block] or block for block in blocks]

    def num_holders(self, content: Content) -> int:
        """Number of holders of the block that this key finds."""
        block = self._by_key.get(content)
        return 0 if block is None else self._ref_counts[block]

    def num_taken(self, contents: Iterable[Content]) -> int:
        """Number of free blocks that are required to hold all `contents`. Contents in a held block require no free
        block."""
        find, ref_counts = self._by_key.get, self._ref_counts
        return sum((block := find(content)) is None or not ref_counts[block] for content in contents)

    def check(self) -> None:
        """Assert that free + held = total, that no free block is held, and that keys and blocks agree."""
        held = sum(count > 0 for count in self._ref_counts)
        assert self.num_free + held == self.num_blocks, f"{self.num_free} free + {held} held != {self.num_blocks}"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        for block in range(self.num_blocks):
            assert (block in self._evictor) == (self._is_found(block) and self._ref_counts[block] == 0)
        assert all(self._ref_counts[block] == 0 and self._keys[block] is None for block in self._free)
        assert all(self._keys[block] == key for key, block in self._by_key.items()), "a key leads to another block"
        by_parent = {(self._parents[block], key) for key, block in self._by_key.items()}
        assert by_parent == {(parent, key) for parent, keys in self._children.items() for key in keys}
