"""The operations of a decoder layer in eager torch, for every device, and the oracle of the tests. The KV cache is
`[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`, keys before values, so that moving a block is one
copy. `layer_cache` is the view `cache[:, layer]`. A slot is `block * block_size + offset`. With latent attention
(DeepSeek-AI, 2024), the third dimension is 1: a head's key is also its value."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from kernels import composed
from kernels.attention.narrow_cache import is_narrow, narrowed, widened
from kernels.attention.options import check_attention_options
from kernels.float8 import FLOAT8
from kernels.inputs import AttentionMetadata
from kernels.linear.experts import choose_experts as choose_experts
from kernels.linear.experts import combine_rows as combine_rows
from kernels.linear.experts import group_rows as group_rows
from kernels.linear.experts import grouped_float8 as grouped_float8
from kernels.linear.experts import grouped_linear as grouped_linear
from kernels.linear.experts import pack_batch_invariant as pack_batch_invariant
from kernels.ops import Activation, ClampedSwiglu, GroupedWeight, LoraWeights, MxFloat4Weight, Ops, Product, Table
from kernels.states import gated_delta_rule as gated_delta_rule
from kernels.states import selective_scan as selective_scan
from kernels.states import short_convolution as short_convolution

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
}
"""Functions of `gated_activation`."""

WIDE_PRODUCTS = False
GROUPED_PRODUCTS = False


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * (weight + offset)` over the last dimension, in float32 (Zhang and Sennrich, 2019). x:
    [..., hidden_size] with any strides, in the weight's dtype or float32. weight: [hidden_size]. dtype: of the result,
    by default the weight's. The result is contiguous. offset: 1 for Gemma, which stores weights minus 1."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (weight.float() + offset)).to(dtype or weight.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Add x to `residual` in place; return the sum's `rms_norm` in the weight's dtype. x: [num_tokens, hidden_size], in
    the weight's dtype or float32. residual: [num_tokens, hidden_size] float32, so that layers do not round it to 16
    bits."""
    residual += x
    return rms_norm(residual, weight, eps, offset)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate each pair (x[i], x[i + rotary_dim/2]) of every head by its angle, in place, in float32 (Su et al., 2021;
    pairs of GPT-NeoX). x: [num_tokens, num_heads, head_dim], any stride between tokens. cos, sin: from `rotary_tables`.
    Elements from rotary_dim on are unchanged."""
    rotated = x[..., : 2 * cos.shape[1]]
    first, second = rotated.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def store_kv(keys: Tensor, values: Tensor, layer_cache: Tensor, slots: Tensor) -> None:
    """Store keys and values in their slots. keys, values: [num_tokens, num_kv_heads, head_dim], any stride between
    tokens. layer_cache: [num_blocks, 2, block_size, num_kv_heads, head_dim], or in 8 bits
    (`kernels.attention.narrow_cache`; compiled CPU kernels: int8 only). slots: [num_tokens] int64, distinct. If the
    cache stores keys only, `values` must be `keys`."""
    if is_narrow(layer_cache.dtype):
        keys, values = narrowed(keys, layer_cache.dtype), narrowed(values, layer_cache.dtype)
    block_size = layer_cache.shape[2]
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    offsets = slots - blocks * block_size
    layer_cache[blocks, 0, offsets] = keys
    layer_cache[blocks, -1, offsets] = values


def paged_attention(
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
) -> Tensor:
    """`softmax(q kᵀ * scale) v`: query tokens attend to their sequence up to themselves (Kwon et al., 2023).

    query: [num_tokens, num_heads, head_dim], any stride between tokens; the result is contiguous. layer_cache: see
    `store_kv`; keys and values of the query tokens are stored already. Consecutive query heads share a key head.
    window: tokens that a token attends to, including itself. chunked: a token attends to its own chunk of `window`
    tokens instead, up to itself (Llama 4; Meta, 2025). soft_cap: scores become `soft_cap * tanh(score / soft_cap)`
    (Gemma Team, 2024). Slots outside a sequence have no effect, even with NaN. Blocks before all windows may
    be others'.

    bias: relative position bias (Raffel et al., 2020) on scaled scores, [num_heads, num_distances] float32, contiguous.
    Entry d is for the key d tokens before the query; the last entry is for all larger distances.

    causal: if false (cross-attention), query tokens attend to all `context_lens` tokens, at least one, and may be more.
    sinks: a learned score of each head, [num_heads] float32, contiguous. The score takes part in the softmax like that
    of a key whose value is zero (gpt-oss; OpenAI, 2025). It is neither scaled nor capped.

    `check_attention_options` checks combinations.
    """
    ends = metadata.visible_ends
    check_attention_options(query, window, soft_cap, bias, causal, sinks, chunked, ends)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    starts, block_size = metadata.query_start.tolist(), layer_cache.shape[2]
    groups = query.shape[1] // layer_cache.shape[3]
    for row, context_len in enumerate(metadata.context_lens.tolist()):
        start, stop = starts[row], starts[row + 1]
        computed = context_len - (stop - start)
        tokens = torch.arange(computed, context_len, device=query.device)[:, None]
        first_keys = tokens * 0
        if window is not None:
            first_keys = tokens - tokens % window if chunked else (tokens - window + 1).clamp(min=0)
        first_block = int(first_keys[0]) // block_size if len(tokens) else 0
        blocks = layer_cache[metadata.block_tables[row, first_block : -(-context_len // block_size)].long()]
        if is_narrow(blocks.dtype):
            blocks = widened(blocks, query.dtype)
        positions = torch.arange(first_block * block_size, context_len, device=query.device)
        keys, values = (
            blocks[:, part].flatten(0, 1)[: len(positions)].transpose(0, 1).repeat_interleave(groups, dim=0)
            for part in (0, -1)
        )
        if causal:
            distance = tokens - positions
        else:
            distance = torch.zeros((stop - start, context_len), dtype=torch.int64, device=query.device)
        visible = distance >= 0 if ends is None else positions <= ends[start:stop, None]
        visible = visible & (positions >= first_keys)
        added = None if bias is None else bias[:, distance.clamp(0, bias.shape[1] - 1)]
        output[start:stop] = _attend(
            query[start:stop].transpose(0, 1), keys, values, visible, scale, soft_cap, added, sinks
        ).transpose(0, 1)
    return output


qkv_attention = partial(composed.qkv_attention, cast(Ops, sys.modules[__name__]))


def gated_activation(x: Tensor, activation: Activation) -> Tensor:
    """`activation(gate) * up` in float32 (Shazeer, 2020). x: [..., 2 * n], gate then up; see also `ClampedSwiglu`.
    Returns [..., n]."""
    if isinstance(activation, ClampedSwiglu):
        alpha, limit = activation
        gate, up = x.float()[..., ::2].clamp(max=limit), x.float()[..., 1::2].clamp(-limit, limit)
        return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(x.dtype)
    gate, up = x.float().chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * up).to(x.dtype)


def add_lora(y: Tensor, x: Tensor, slots: Tensor, weights: LoraWeights) -> None:
    """Add each row's adapter, `(x @ a.T) @ b`, to y in place; sums are float32 (Hu et al., 2021). y: [rows, outputs],
    in x's dtype or float32. x: [rows, inputs]. slots: [rows] int32, negative without adapter. Rows may have different
    adapters, as in Punica (Chen et al., 2023)."""
    for slot in set(slots.tolist()):
        if slot < 0 or not (rank := int(weights.ranks[slot])):
            continue
        rows = (slots == slot).nonzero().flatten()
        wide = x[rows].float()
        added = [
            wide @ weights.a[slot, part, :rank].float().T @ weights.b[slot, :rank, start:stop].float()
            for part, (start, stop) in enumerate(pairwise(weights.starts))
        ]
        y[rows] = (y[rows].float() + torch.cat(added, dim=1)).to(y.dtype)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` in float32. x: [rows, inputs]; weight: [outputs, inputs]."""
    if x.device.type != "cuda" or x.dtype is torch.float32:
        return functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    product = torch.mm(x, weight.T, out_dtype=torch.float32)
    return product if bias is None else product.add_(bias)


def pack(weight: Tensor, wide: bool = False) -> Product | None:
    """A product that is faster than torch's `linear`, or None. weight: [outputs, inputs]. wide: whether results are
    float32 in place of x's dtype. Uses oneDNN's packed bf16 layout: 1 to 32 rows take 33 to 75 % of the time,
    bit-identical. The layout has no float32 results, so a CPU stores the weight in float32 if `wide`."""
    if wide and weight.device.type == "cpu" and weight.dtype is not torch.float32:
        widened = weight.float()
        return lambda x, bias: wide_linear(x, widened, bias)
    if wide or not (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x, bias: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def wide_itemsize(dtype: torch.dtype) -> int:  # noqa: ARG001 (others use it)
    """Bytes of an element in the copy that `pack` makes on a CPU if `wide`. dtype: the weight's."""
    return torch.float32.itemsize


def pack_int8(weight: Tensor, wide: bool = False) -> Product | None:  # noqa: ARG001 (others use it)
    """`pack` in int8, which halves the memory; None if not faster."""
    return None


def pack_int4(weight: Tensor, wide: bool = False) -> Product | None:  # noqa: ARG001 (others use it)
    """`pack` with the weight in 4 bits and x in 8 bits; None if not faster."""
    return None


def pack_w8a8(weight: Tensor, wide: bool = False) -> Table | None:  # noqa: ARG001 (others use it)
    """`pack` with weight and x in 8 bits; None if not faster."""
    return None


def pack_grouped(weight: GroupedWeight, wide: bool = False) -> Table | None:  # noqa: ARG001 (others use it)
    """`pack_int4` for a quantised weight; None if not faster."""
    return None


def pack_mx_float4(weight: MxFloat4Weight, wide: bool = False) -> Product | None:  # noqa: ARG001 (others use it)
    """`pack` with the weight in MXFP4; None if not faster. Raises ValueError for a scale that is too large."""
    return None


pack_float8 = partial(composed.pack_float8, cast(Ops, sys.modules[__name__]))


def copy_blocks(cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy whole blocks, with all layers; all sources are read before any destination is written. cache: [num_blocks,
    ...]. sources, destinations: [n] int64, destinations distinct."""
    if cache.dtype is FLOAT8:
        cache = cache.view(torch.int8)  # torch cannot copy e4m3
    cache.index_copy_(0, destinations, cache.index_select(0, sources))


def shared_tokens(groups: int, head_dim: int, dtype: torch.dtype) -> int:  # noqa: ARG001 (others use them)
    """Maximum of decodes that compute a part of `metadata.shared` together; 0 if the kernels do not use it. groups:
    query heads of a key head."""
    return 0


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    soft_cap: float | None,
    bias: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """query: [heads, n, head_dim]; keys, values: [heads, context, head_dim]; visible: [n, context] bool; bias: [heads,
    n, context] float32; sinks: [heads] float32."""
    if soft_cap is None and bias is None and sinks is None:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=scale)
    scores = query.float() @ keys.float().transpose(1, 2) * scale
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill_(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[1]]
    return (weights @ values.float()).to(query.dtype)
