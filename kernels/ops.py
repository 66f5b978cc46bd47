"""The interface of a backend for a decoder layer: a module with one function for each method of `Ops`.
`kernels.reference`, `kernels.states`, `kernels.composed` and `kernels.linear.experts` define the operations; backends
use these functions where they have no faster kernel."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.float8 import Float8Weight
from kernels.inputs import AttentionMetadata

Product = Callable[[Tensor, Tensor | None], Tensor]
"""`x @ weight.T + bias` for a packed weight. Arguments: x [rows, inputs], and bias [outputs] or None."""


@runtime_checkable
class Table(Protocol):
    """A `Product` that can also return rows of its weight, such as embeddings."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor: ...

    def rows(self, numbers: Tensor) -> Tensor:
        """numbers: [n] int64. Returns [n, inputs] float32."""


@dataclass(frozen=True)
class LoraWeights:
    """Adapters of a linear layer, each in a slot. Parts are the layer's fused projections, with separate inner
    units."""

    a: Tensor
    """[slots, parts, max_rank, inputs]: LoRA's A."""
    b: Tensor
    """[slots, max_rank, outputs]: LoRA's B, scaled. Inner units of a part affect outputs of the same part only."""
    ranks: Tensor
    """[slots] int32: inner units of each part; 0 if the adapter does not change this layer."""
    starts: tuple[int, ...]
    """Each part's first output, then the number of all outputs."""


class GroupedWeight(NamedTuple):
    """A quantised weight: `number * scale - minimum`, with scale and minimum for groups of neighbouring inputs.

    numbers: [outputs, inputs] uint8, below 2 ** `bits`. scales: [outputs, groups] float16; groups have 32 or 16 inputs,
    the last maybe fewer. minimums: [outputs, groups] float16; None: the scale times 2 ** (`bits` - 1). units: None, or
    [outputs, inputs / 256, 2] float16 for scales and minimums; without minimums [outputs, inputs / 256, 1]. With units,
    scales and minimums are uint8 multiples of the unit of 256 inputs; without minimums, scales are int8. order:
    [inputs] int64, the input of each column of `numbers`, by which products reorder x; None: in order.

    Kernels support, without units, 4, 5 or 8 bits with groups of 32, and 8 bits with minimums and groups of 16; with
    units, 4 or 5 bits with minimums and groups of 32, and 6 bits without minimums with groups of 16.
    """

    numbers: Tensor
    scales: Tensor
    minimums: Tensor | None
    bits: int
    units: Tensor | None = None
    order: Tensor | None = None


class MxFloat4Weight(NamedTuple):
    """A weight in MXFP4, see `kernels.linear.mx_float4`. numbers: [outputs, inputs] uint8, e2m1 in the lower four bits.
    scales: [outputs, inputs / 32] uint8, exponents of two plus 127."""

    numbers: Tensor
    scales: Tensor


QuantizedWeight = GroupedWeight | Float8Weight | MxFloat4Weight


class ExpertRows(NamedTuple):
    """Rows of a mixture of experts, grouped by expert; a token has one for each of its experts."""

    tokens: Tensor
    """[rows] int64: each row's token, ascending within an expert."""
    places: Tensor
    """[num_tokens, num_chosen] int64: each token's rows, in the order of its experts."""
    ends: Tensor
    """[num_experts] int64: the row after each expert's last."""


class ClampedSwiglu(NamedTuple):
    """The activation `(up + 1) * gate * sigmoid(alpha * gate)`, with gate at most `limit` and up within ±limit
    (gpt-oss; OpenAI, 2025). Gate and up alternate in the input: gate, up, gate, up."""

    alpha: float
    limit: float


Activation = str | ClampedSwiglu
"""A name in `kernels.reference.ACTIVATIONS`, or a `ClampedSwiglu`."""


class Ops(Protocol):
    """The operations of a decoder layer, which take effect in the order of their calls. `qkv_attention` stores all
    rows' keys and values before any row attends, so a row may attend to a shared block that another row of the step
    fills."""

    WIDE_PRODUCTS: bool
    """Whether float32 results are as fast as 16 bits."""

    GROUPED_PRODUCTS: bool
    """Whether `grouped_linear` is faster than a product for each expert."""

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
        sinks: Tensor | None = None,
        chunked: bool = False,
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
        sinks: Tensor | None = None,
        chunked: bool = False,
    ) -> Tensor: ...

    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor: ...

    def pack(self, weight: Tensor, wide: bool = False) -> Product | None: ...

    def pack_int8(self, weight: Tensor, wide: bool = False) -> Product | None: ...

    def pack_int4(self, weight: Tensor, wide: bool = False) -> Product | None: ...

    def pack_w8a8(self, weight: Tensor, wide: bool = False) -> Table | None: ...

    def pack_grouped(self, weight: GroupedWeight, wide: bool = False) -> Table | None: ...

    def pack_mx_float4(self, weight: MxFloat4Weight, wide: bool = False) -> Product | None: ...

    def pack_float8(self, weight: Float8Weight, wide: bool = False) -> Product: ...

    def pack_batch_invariant(self, weight: Tensor, wide: bool = False) -> Product: ...

    def grouped_linear(self, x: Tensor, weights: Tensor, ends: Tensor, wide: bool = False) -> Tensor: ...

    def grouped_float8(self, x: Tensor, weight: Float8Weight, ends: Tensor, wide: bool = False) -> Tensor: ...

    def choose_experts(self, logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]: ...

    def group_rows(self, experts: Tensor, num_experts: int) -> ExpertRows: ...

    def combine_rows(self, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor: ...

    def wide_itemsize(self, dtype: torch.dtype) -> int: ...

    def add_lora(self, y: Tensor, x: Tensor, slots: Tensor, weights: LoraWeights) -> None: ...

    def copy_blocks(self, cache: Tensor, sources: Tensor, destinations: Tensor) -> None: ...

    def short_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: Tensor,
        metadata: AttentionMetadata,
        activation: str | None,
    ) -> Tensor: ...

    def gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor | None,
        states: Tensor,
        metadata: AttentionMetadata,
        normalize: bool,
    ) -> Tensor: ...

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        states: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor: ...
