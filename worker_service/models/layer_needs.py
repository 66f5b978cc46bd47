"""The cache that each layer of a network needs: keys and values of all tokens, or states of fixed size."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.attention.narrow_cache import stored_size

_ALIGNMENT = 64
"""Bytes. States begin at multiples of it, like cache lines."""


@dataclass(frozen=True)
class LayerKeys:
    """Keys and values of one layer."""

    num_kv_heads: int
    head_dim: int
    parts: int = 2
    """1 if a head's key is also its value (see `kernels.reference`)."""
    window: int | None = None
    """Tokens that each token attends to, including itself; None for all earlier tokens."""
    chunked: bool = False
    """Whether each token attends to its own chunk of `window` tokens, in place of the last `window` tokens."""

    def token_bytes(self, dtype: torch.dtype) -> int:
        return self.parts * self.num_kv_heads * stored_size(self.head_dim, dtype) * dtype.itemsize

    def view(self, part: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
        """part: [num_blocks, block_size * token_bytes] uint8. Returns [num_blocks, parts, block_size, num_kv_heads,
        elements of a head]."""
        shape = (self.parts, block_size, self.num_kv_heads, stored_size(self.head_dim, dtype))
        heads: Tensor = part.view(dtype).unflatten(1, shape)  # type: ignore[no-untyped-call]
        return heads


class State(NamedTuple):
    shape: tuple[int, ...]
    is_wide: bool
    """Whether it is float32 in a network of any type, as sums over all tokens are."""

    def dtype_in(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self.is_wide else dtype


@dataclass(frozen=True)
class LayerStates:
    """States of one layer for each sequence: of convolutions, and sums over all computed tokens."""

    states: tuple[State, ...]

    def num_bytes(self, dtype: torch.dtype) -> int:
        return sum(self._sizes(dtype))

    def view(self, part: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """part: [num_blocks, num_bytes] uint8. Returns each state, [num_blocks, *shape]."""
        views, start = [], 0
        for state, size in zip(self.states, self._sizes(dtype), strict=True):
            own = state.dtype_in(dtype)
            elements = part[:, start : start + prod(state.shape) * own.itemsize].view(own)
            views.append(elements.unflatten(1, state.shape))  # type: ignore[no-untyped-call]
            start += size
        return tuple(views)

    def _sizes(self, dtype: torch.dtype) -> list[int]:
        """Bytes of each state, in whole alignments."""
        sizes = (prod(state.shape) * state.dtype_in(dtype).itemsize for state in self.states)
        return [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]


LayerNeeds = LayerKeys | LayerStates


class _Uniform(Protocol):
    """A network whose layers all have keys and values of one size."""

    @property
    def head_dim(self) -> int: ...

    @property
    def kv_parts(self) -> int: ...

    @property
    def windows(self) -> Sequence[int | None]: ...


def needs_of(config: _Uniform, num_kv_heads: int) -> tuple[LayerNeeds, ...]:
    """The needs of each layer: `layer_needs` of a configuration whose layers differ, or else its sizes.

    num_kv_heads: this rank's."""
    own: tuple[LayerNeeds, ...] = getattr(config, "layer_needs", ())
    chunks: Sequence[bool] = getattr(config, "chunks", [False] * len(config.windows))
    return own or tuple(
        LayerKeys(num_kv_heads, config.head_dim, config.kv_parts, window, chunked)
        for window, chunked in zip(config.windows, chunks, strict=True)
    )


def has_one_kind(layers: Sequence[LayerNeeds]) -> bool:
    """Whether all layers have keys and values of one size, so that one block table can serve all."""
    sizes = {replace(needs, window=None, chunked=False) if isinstance(needs, LayerKeys) else needs for needs in layers}
    return len(sizes) == 1 and isinstance(sizes.pop(), LayerKeys)
