"""Reference-counted numbers of the blocks in one memory pool."""


class BlockAllocator:
    """Hands out the block numbers 0 … num_blocks - 1. A block is free again when its last holder lets go."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is the warmest

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """A free block, held once; raises IndexError when there is none: ask `num_free` first."""
        block = self._free.pop()
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Let one more holder have an allocated block."""
        if self._ref_counts[block] == 0:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._ref_counts[block] += 1

    def free(self, block: int) -> None:
        """Let go of a block once; raises ValueError when nobody holds it."""
        if self._ref_counts[block] == 0:
            raise ValueError(f"block {block} is free already")
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._free.append(block)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def check(self) -> None:
        """Assert free + held = total and that no free block is held."""
        held = sum(count > 0 for count in self._ref_counts)
        assert len(self._free) + held == self.num_blocks, f"{len(self._free)} free + {held} held != {self.num_blocks}"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert all(self._ref_counts[block] == 0 for block in self._free), "a free block is held"
