"""Divides a network's layers into groups that need the same cache: keys and values of one size, of all tokens or of a
window, or states.

The blocks of all groups have the same number of bytes, so that one pool serves all. A group with fewer bytes a token
has more tokens in a block. A sequence has one block in a group with states, so layers with large states are divided
into several groups, and the other groups' blocks get more tokens. (vLLM's hybrid KV cache manager has equally many
layers in each group instead, and more groups.)
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

import torch

from worker_service.models.layer_needs import LayerKeys, LayerNeeds, has_one_kind

MAX_GROUPS = 8
"""Maximum number of groups. For each group, every step plans a block table."""
MAX_SPAN = 256
"""Tokens. Prefixes are cached at multiples of a span, the least common multiple of the groups' blocks."""
MAX_UNUSED = 0.1
"""Maximum unused share of a block's bytes."""
MAX_UNUSED_WITHOUT_WINDOW = 0.05
"""Maximum unused share of blocks for layers without a window, which hold most blocks of long contexts."""
MAX_SHARE = 0.9
"""Maximum share of a long context's memory that groups may need, compared with no groups. It applies if all layers have
keys of one size."""
_TYPICAL_LEN = 8192
"""Tokens of the sequence whose unused bytes are counted if layers have states."""
_ALIGNMENT = 64
"""Bytes. Blocks begin at multiples of it, so that states of any type can be read."""


@dataclass(frozen=True)
class LayerGroup:
    layers: tuple[int, ...]
    """Numbers of the layers' needs."""
    window: int
    """Tokens that each token attends to, including itself; 0 means all. The largest of the layers' windows."""
    block_size: int
    """Tokens of a block; 0 if the layers have states."""
    needs: LayerNeeds
    """Each layer's, but for the windows."""
    layer_bytes: int
    """Bytes of a block for each layer."""
    chunked: bool = False
    """Whether each token attends to its own chunk of `window` tokens, in place of the last `window` tokens."""

    @property
    def num_bytes(self) -> int:
        """Used bytes of a block."""
        return len(self.layers) * self.layer_bytes


def group_layers(
    layers: Sequence[LayerNeeds],
    block_size: int,
    max_model_len: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    max_span: int | None = None,
) -> tuple[LayerGroup, ...]:
    """Groups without a window, with a window, and with states, in this order; () if all layers have keys of one size
    and groups would save less than a tenth of the memory.

    block_size: minimum tokens of a block in the group with most bytes a token. A window of `max_model_len` tokens or
    more counts as no window. cache_dtype: that of keys and values, if it is another. max_span: tokens of the largest
    step. With states, a layout exceeds it only if every layout does. Raises ValueError if there are too many kinds of
    layers."""
    keys, states = _kinds(layers, max_model_len, dtype, cache_dtype or dtype)
    if len(keys) + len(states) > MAX_GROUPS:
        raise ValueError(f"its layers have caches of {len(keys) + len(states)} kinds, and {MAX_GROUPS} are supported")
    if states:
        return _with_states(keys, states, block_size, min(max_model_len, _TYPICAL_LEN), max_span)
    if len(keys) <= 1:
        return ()
    groups = _sized(keys, block_size)
    if not has_one_kind(layers):
        return groups
    page = max(group.num_bytes for group in groups)
    of_a_token = sum(page / group.block_size for group in groups if not group.window)  # in a long context
    return groups if of_a_token <= MAX_SHARE * sum(kind.num_bytes for kind in keys) else ()


def page_bytes(groups: Sequence[LayerGroup]) -> int:
    """Bytes of a block in every group."""
    return -(-max(group.num_bytes for group in groups) // _ALIGNMENT) * _ALIGNMENT


def unused_share(groups: Sequence[LayerGroup], num_tokens: int) -> float:
    """Share of unused bytes in the blocks of one sequence."""
    page, held, used = page_bytes(groups), 0, 0
    for group in groups:
        kept = min(num_tokens, group.window or num_tokens)
        held += page * (-(-kept // group.block_size) if group.block_size else 1)
        used += group.num_bytes * kept // group.block_size if group.block_size else group.num_bytes
    return 1 - used / held


def _kinds(
    layers: Sequence[LayerNeeds], max_model_len: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> tuple[list[LayerGroup], list[LayerGroup]]:
    """Groups of layers with keys, with one token in a block, and groups of layers with states."""
    found: defaultdict[tuple[LayerNeeds, bool, int], list[int]] = defaultdict(list)
    windows: dict[tuple[LayerNeeds, bool, int], int] = {}
    for number, needs in enumerate(layers):
        window, chunk = 0, 0
        if isinstance(needs, LayerKeys):
            window = needs.window if needs.window is not None and needs.window < max_model_len else 0
            chunk = window if needs.chunked else 0
            needs = replace(needs, window=None, chunked=False)
        kind = needs, window > 0, chunk
        found[kind].append(number)
        windows[kind] = max(windows.get(kind, 0), window)
    keys, states = [], []
    for kind, numbers in sorted(found.items(), key=lambda item: item[0][1]):
        (needs, _, chunk), window = kind, windows[kind]
        if isinstance(needs, LayerKeys):
            of_token = needs.token_bytes(cache_dtype)
            keys.append(LayerGroup(tuple(numbers), window, 1, needs, of_token, chunked=chunk > 0))
        else:
            states.append(LayerGroup(tuple(numbers), 0, 0, needs, needs.num_bytes(dtype)))
    return keys, states


def _sized(keys: Sequence[LayerGroup], block_size: int) -> tuple[LayerGroup, ...]:
    """Groups whose blocks have nearly the same bytes. block_size: tokens of a block in the group with most bytes."""
    largest = max(keys, key=lambda kind: kind.num_bytes)
    span, page = block_size, largest.num_bytes * block_size
    groups = []
    for kind in keys:
        tokens = block_size if kind is largest else _tokens(kind, largest, page, span)
        span = lcm(span, tokens)
        groups.append(replace(kind, block_size=tokens, layer_bytes=tokens * kind.layer_bytes))
    return tuple(groups)


def _tokens(smaller: LayerGroup, larger: LayerGroup, page: int, span: int) -> int:
    """Block size in tokens of the group with fewer bytes. Among sizes that leave few bytes unused, the size with the
    smallest span.

    page: bytes of the larger group's blocks. span: that of the groups before."""

    def unused(tokens: int) -> tuple[float, float]:
        """Unused shares of both groups' blocks."""
        own = smaller.num_bytes * tokens
        return 1 - own / max(own, page), 1 - page / max(own, page)

    most = [MAX_UNUSED if group.window else MAX_UNUSED_WITHOUT_WINDOW for group in (smaller, larger)]
    exact = page // smaller.num_bytes
    sizes = [size for size in range(1, 2 * exact + 1) if lcm(size, span) <= max(MAX_SPAN, span)]
    good = [size for size in sizes if all(share <= limit for share, limit in zip(unused(size), most, strict=True))]
    if good:
        return min(good, key=lambda size: (lcm(size, span), unused(size)))
    return min(sizes, key=lambda size: max(unused(size)))


def _with_states(
    keys: Sequence[LayerGroup], states: Sequence[LayerGroup], block_size: int, num_tokens: int, max_span: int | None
) -> tuple[LayerGroup, ...]:
    """The groups with the smallest blocks that leave at most `MAX_UNUSED` of a sequence of `num_tokens` tokens unused.
    If no layout does, the layout with the fewest unused bytes. Layouts with a span of at most `max_span` come first.
    Without keys, the fewest groups are best."""

    def cost(groups: tuple[LayerGroup, ...]) -> tuple[float, ...]:
        unused = unused_share(groups, num_tokens)
        size = page_bytes(groups) if keys else 0
        span = lcm(*(group.block_size for group in groups if group.block_size))
        excess = 0 if max_span is None else max(0, span - max_span)
        return (excess, max(unused, MAX_UNUSED), size, len(groups), unused)

    return min(_layouts(keys, states, block_size), key=cost)


def _layouts(
    keys: Sequence[LayerGroup], states: Sequence[LayerGroup], block_size: int
) -> Iterator[tuple[LayerGroup, ...]]:
    """The groups for each number of layers that share a block of states."""
    largest = max((kind.num_bytes for kind in keys), default=0)
    for kind in states:
        for num_layers in range(1, len(kind.layers) + 1):
            size = max(num_layers * kind.layer_bytes, *(other.layer_bytes for other in states))
            sized: tuple[LayerGroup, ...] = ()
            if keys:
                sized = _sized(keys, block_size * max(1, -(-size // (largest * block_size))))
                size = max(size, *(group.num_bytes for group in sized))
            divided = [group for kind in states for group in _divided(kind, size // kind.layer_bytes)]
            if len(sized) + len(divided) <= MAX_GROUPS:
                yield (*sized, *divided)


def _divided(kind: LayerGroup, most: int) -> Iterator[LayerGroup]:
    """Groups of at most `most` layers of one kind; the last group may have fewer than the others."""
    num_groups = -(-len(kind.layers) // most)
    size = -(-len(kind.layers) // num_groups)
    for start in range(0, len(kind.layers), size):
        yield replace(kind, layers=kind.layers[start : start + size])
