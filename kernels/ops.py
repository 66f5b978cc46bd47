"""The interface of a backend: a module with one function for each method of `Ops`, the operations of a decoder layer.

If a backend's kernel would not be faster than eager torch, the backend uses the function of `kernels.reference`. The
docstrings of `kernels.reference`, `kernels.composed` and `kernels.linear.experts` define the operations.
`kernels.backends` chooses a backend.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.attention.metadata import AttentionMetadata
from kernels.float8 import Float8Weight

Product = Callable[[Tensor, Tensor | None], Tensor]
"""A function that computes `x @ weight.T + bias` from x, [rows, inputs], and bias, [outputs] or None."""


@runtime_checkable
class Table(Protocol):
    """A `Product` that can also return rows of its packed weight."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor: ...

    def rows(self, numbers: Tensor) -> Tensor:
        """Read rows of the weight. numbers: [n] int64, the outputs. Returns [n, inputs] float32."""


@dataclass(frozen=True)
class LoraWeights:
    """The weights of several adapters for one product. Each adapter has a slot.

    The product's outputs belong to one projection or to several fused projections, the parts. Each part has separate
    inner units.
    """

    a: Tensor
    """[slots, parts, max_rank, inputs]: weights from inputs to inner units."""
    b: Tensor
    """[slots, max_rank, outputs]: weights from inner units to outputs, multiplied by the adapter's scaling factor.
    Inner units of a part contribute only to the part's outputs."""
    ranks: Tensor
    """[slots] int32: number of inner units of each part; 0 if the slot's adapter does not change this product."""
    starts: tuple[int, ...]
    """The first output of each part, and at the end the number of all outputs."""


class GroupedWeight(NamedTuple):
    """A quantised weight `number * scale - minimum`. A group of neighbouring inputs of an output shares scale and
    minimum.

    numbers: [outputs, inputs] uint8, below 2 to the power of `bits`. scales: [outputs, groups] float16. A group has 32
    or 16 inputs; the last group may have fewer inputs. minimums: [outputs, groups] float16, or None. None means that
    the minimum is scale times the middle number, 2 to the power of (`bits` - 1). units: None, or [outputs, inputs /
    256, 2] float16 with a unit for scales and a unit for minimums. Without minimums, units are [outputs, inputs / 256,
    1]. If a weight has units, scales and minimums are uint8, and are multiplied by the unit of their 256 inputs. With
    units and without minimums, scales are int8. order: [inputs] int64, the input of each column of numbers, if the
    inputs of groups are not neighbours. Products reorder x by `order`.

    Without units, there are products for 4, 5 and 8 bits with groups of 32, and for 8 bits with minimums and groups of
    16. With units, there are products for 4 and 5 bits with minimums and groups of 32, and for 6 bits without minimums
    and groups of 16.
    """

    numbers: Tensor
    scales: Tensor
    minimums: Tensor | None
    bits: int
    units: Tensor | None = None
    order: Tensor | None = None


QuantizedWeight = GroupedWeight | Float8Weight


class Ops(Protocol):
    """The operations of a backend.

    Operations take effect in the order of their calls. `qkv_attention` stores keys and values of all rows before any
    row attends. If sequences share a prefix, a row may therefore attend to a block that another row of the same step
    fills.
    """

    WIDE_PRODUCTS: bool
    """Whether products return float32 sums as fast as sums rounded to 16 bits."""

    GROUPED_PRODUCTS: bool
    """Whether `grouped_linear` is faster than one packed product for each expert."""

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
        bias: Tensor | None = None,
        causal: bool = True,
    ) -> Tensor: ...

    def shared_tokens(self, groups: int, head_dim: int, dtype: torch.dtype) -> int: ...

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

    def pack_int4(self, weight: Tensor, wide: bool = False) -> Product | None: ...

    def pack_w8a8(self, weight: Tensor, wide: bool = False) -> Table | None: ...

    def pack_grouped(self, weight: GroupedWeight, wide: bool = False) -> Table | None: ...

    def pack_float8(self, weight: Float8Weight, wide: bool = False) -> Product: ...

    def pack_batch_invariant(self, weight: Tensor, wide: bool = False) -> Product: ...

    def grouped_linear(self, x: Tensor, weights: Tensor, ends: Tensor, wide: bool = False) -> Tensor: ...

    def grouped_float8(self, x: Tensor, weight: Float8Weight, ends: Tensor, wide: bool = False) -> Tensor: ...

    def combine_rows(self, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor: ...

    def wide_itemsize(self, dtype: torch.dtype) -> int: ...

    def add_lora(self, y: Tensor, x: Tensor, slots: Tensor, weights: LoraWeights) -> None: ...

    def copy_blocks(self, cache: Tensor, sources: Tensor, destinations: Tensor) -> None: ...
