"""Divides a network's layers into groups whose keys and values stay in the cache equally long.

The blocks of all groups have the same number of bytes, so that one pool serves all: a group with fewer layers has more
tokens in a block. (vLLM's hybrid KV cache manager has equally many layers in each group instead, and more groups.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

MAX_SPAN = 256
"""Tokens. Prefixes are cached at multiples of a span, the least common multiple of the groups' blocks."""
MAX_UNUSED = 0.1
"""Maximum unused share of a block's bytes."""
MAX_UNUSED_WITHOUT_WINDOW = 0.05
"""Maximum unused share of blocks for layers without a window, which hold most blocks of long contexts."""


MAX_SHARE = 0.9
"""Memory of a long context with groups, as a share of the memory without. Above it, there are no groups."""


@dataclass(frozen=True)
class LayerGroup:
    layers: tuple[int, ...]
    """Numbers of the layers in the network."""
    window: int
    """Tokens that each token attends to, including itself; 0 means all. The largest of the layers' windows."""
    block_size: int
    """Tokens of a block."""

    @property
    def size(self) -> int:
        """Tokens of a block, counted for each layer."""
        return len(self.layers) * self.block_size


def group_layers(windows: Sequence[int | None], block_size: int, max_model_len: int) -> tuple[LayerGroup, ...]:
    """The group of layers without a window, then the group of layers with a window; () if all layers are of one kind.

    windows: each layer's window in tokens. A window of `max_model_len` tokens or more counts as no window.
    block_size: tokens of a block in the group with more layers.
    """
    limited = [window is not None and window < max_model_len for window in windows]
    whole = tuple(number for number, is_limited in enumerate(limited) if not is_limited)
    recent = tuple(number for number, is_limited in enumerate(limited) if is_limited)
    if not whole or not recent:
        return ()
    window = max(window for window in windows if window is not None and window < max_model_len)
    fewer, more = sorted((whole, recent), key=len)
    tokens = _tokens_of_fewer(len(fewer), len(more), block_size, fewer is whole)
    sizes = {len(more): block_size} | {len(fewer): tokens}
    groups = LayerGroup(whole, 0, sizes[len(whole)]), LayerGroup(recent, window, sizes[len(recent)])
    of_a_token = max(group.size for group in groups) / groups[0].block_size  # in a long context
    return groups if of_a_token <= MAX_SHARE * len(windows) else ()


def _tokens_of_fewer(num_fewer: int, num_more: int, block_size: int, is_whole: bool) -> int:
    """Block size in tokens of the group with fewer layers. Among sizes that leave few bytes unused, the one with the
    smallest span."""

    def unused(tokens: int) -> tuple[float, float]:
        """Unused shares of the blocks without and with a window."""
        page = max(num_fewer * tokens, num_more * block_size)
        of_fewer, of_more = 1 - num_fewer * tokens / page, 1 - num_more * block_size / page
        return (of_fewer, of_more) if is_whole else (of_more, of_fewer)

    exact = num_more * block_size // num_fewer
    sizes = [size for size in range(1, 2 * exact + 1) if lcm(size, block_size) <= max(MAX_SPAN, block_size)]
    good = [size for size in sizes if unused(size)[0] <= MAX_UNUSED_WITHOUT_WINDOW and unused(size)[1] <= MAX_UNUSED]
    if good:
        return min(good, key=lambda size: (lcm(size, block_size), unused(size)))
    return min(sizes, key=lambda size: max(unused(size)))
