"""The interface of a backend for the operations of a decoder layer. A backend is a module with one function for each
method of `Ops`.

If a backend has no faster kernel for an operation, it uses the function of `kernels.reference`. The docstrings of
`kernels.reference`, `kernels.composed` and `kernels.linear.experts` define the operations. `kernels.backends` chooses a
backend.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.attention.metadata import AttentionMetadata
from kernels.float8 import Float8Weight

Product = Callable[[Tensor, Tensor | None], Tensor]
"""A function with a packed weight that computes `x @ weight.T + bias` from the arguments x, [rows, inputs], and bias,
[outputs] or None."""


@runtime_checkable
class Table(Protocol):
    """A `Product` that can also return rows of its packed weight, such as the embeddings of tokens."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor: ...

    def rows(self, numbers: Tensor) -> Tensor:
        """Read rows of the weight. numbers is [n] int64, the numbers of the rows. Returns [n, inputs] float32."""


@dataclass(frozen=True)
class LoraWeights:
    """The weights of several adapters for one linear layer. Each adapter has a slot.

    The outputs of the linear layer consist of parts: a part is one of several fused projections, or the only
    projection. Each part has separate inner units.
    """

    a: Tensor
    """[slots, parts, max_rank, inputs]: the weights from inputs to inner units (LoRA's matrix A)."""
    b: Tensor
    """[slots, max_rank, outputs]: the weights from inner units to outputs (LoRA's matrix B), multiplied by the
    adapter's scaling factor. The inner units of a part contribute only to the outputs of the same part."""
    ranks: Tensor
    """[slots] int32: number of inner units of each part; 0 if the slot's adapter does not change this linear layer."""
    starts: tuple[int, ...]
    """The number of the first output of each part, followed by the number of all outputs."""


class GroupedWeight(NamedTuple):
    """A quantised weight matrix with the values `number * scale - minimum`. A group of neighbouring inputs of an output
    shares a scale and a minimum.

    numbers is [outputs, inputs] uint8, each below 2 to the power of `bits`. scales is [outputs, groups] float16. A
    group has 32 or 16 inputs; the last group may have fewer inputs. minimums is [outputs, groups] float16, or None. If
    minimums is None, each minimum is the scale times the middle number, which is 2 to the power of (`bits` - 1). units
    is None, or [outputs, inputs / 256, 2] float16 with a unit for scales and a unit for minimums. If minimums is None,
    units are [outputs, inputs / 256, 1]. If a weight has units, its scales and minimums are uint8, and are multiplied
    by the unit of their 256 inputs. If a weight has units but no minimums, its scales are int8. order is [inputs]
    int64, the number of the input to which each column of `numbers` belongs, or None if columns are in the order of
    inputs. Products reorder x by `order`.

    Kernels support only some combinations. Weights without units may have 4, 5 or 8 bits with groups of 32, or 8 bits
    with minimums and groups of 16. Weights with units may have 4 or 5 bits with minimums and groups of 32, or 6 bits
    without minimums and with groups of 16.
    """

    numbers: Tensor
    scales: Tensor
    minimums: Tensor | None
    bits: int
    units: Tensor | None = None
    order: Tensor | None = None


QuantizedWeight = GroupedWeight | Float8Weight


class Ops(Protocol):
    """The operations of a decoder layer, which each backend implements.

    Operations take effect in the order of their calls. `qkv_attention` stores the keys and values of all rows before it
    computes the attention of any row. If sequences share a prefix, a row may therefore attend to a block that another
    row of the same step fills.
    """

    WIDE_PRODUCTS: bool
    """Whether a product that returns float32 is as fast as a product that returns 16 bits."""

    GROUPED_PRODUCTS: bool
    """Whether `grouped_linear` is faster than a separate product with a packed weight for each expert."""

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
