"""The operations of a decoder layer that each backend has: a module with one function for every one of `Ops`.

A backend that does an operation no better than eager torch takes it from `kernels.reference`. The docstrings there and
in `kernels.composed` say what each operation computes. `kernels.backends` chooses a backend.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kernels.metadata import AttentionMetadata

Product = Callable[[Tensor, Tensor | None], Tensor]
"""Computes `x @ weight.T + bias` of x, [rows, inputs], and bias, [outputs] or None."""


class Ops(Protocol):
    """What a backend offers."""

    WIDE_PRODUCTS: bool
    """Whether products write the float32 in which they sum as fast as they write 16 bits."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, dtype: torch.dtype | None = None
    ) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor: ...

    def rotary_embedding(self, x: Tensor, cos: Tensor, sin: Tensor) -> None: ...

    def store_kv(self, keys: Tensor, values: Tensor, layer_cache: Tensor, slots: Tensor) -> None: ...

    def paged_attention(
        self,
        query: Tensor,
        layer_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor: ...

    def qkv_attention(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        offset: float,
        rotation: tuple[Tensor, Tensor] | None,
        layer_cache: Tensor,
        slots: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor: ...

    def gated_activation(self, x: Tensor, activation: str) -> Tensor: ...

    def pack(self, weight: Tensor, wide: bool = False) -> Product | None: ...

    def pack_int8(self, weight: Tensor, wide: bool = False) -> Product | None: ...

    def wide_itemsize(self, dtype: torch.dtype) -> int: ...

    def copy_blocks(self, cache: Tensor, sources: Tensor, destinations: Tensor) -> None: ...
